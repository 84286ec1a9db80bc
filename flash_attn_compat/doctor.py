"""flash-attn-compat doctor: describes the machine, explains typical calls, checks answers, tests who finds flash_attn.

examine() returns a Report of plain values; to_text and to_json format it. Nothing is changed or installed. Steps that
may break a GPU's context run in child processes, after the machine has been described.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import flash_attn_compat
from flash_attn_compat import installed, self_check, settings
from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from flash_attn_compat.backends.fused.judging import faults
from flash_attn_compat.backends.fused.tuning import tuned
from flash_attn_compat.core.features import dtype_name, lacks_tensor_cores
from flash_attn_compat.dropin import install, installed_package
from flash_attn_compat.installed import SITE, RealFlashAttn, is_stand_in_spec
from flash_attn_compat.isolation import Ended, may_break, run_in_children
from flash_attn_compat.self_check import Check
from flash_attn_compat.torch_flex import override as flex_override
from flash_attn_compat.torch_flex.policy import Policy, device_reasons
from flash_attn_compat.torch_sdpa import override

_CHECKS = """Self-check: errors against fp64, in brackets plain PyTorch's in the same dtype
  (ok: out is off by at most twice that, gradients by three times, plus one rounding of the dtype)"""
_ADVICE = "What to do: docs/troubleshooting.md"


@dataclass(frozen=True)
class Machine:
    python: str
    system: str
    torch: str
    device: str  # the device of the calls below: cuda:0, mps or cpu
    device_name: str
    capability: str | None
    built_for: list[str]  # the architectures that this PyTorch binary has code for
    has_code_for_device: bool
    kernels: list[str]  # of this package's kernels: the compiler, the cache folder, tuning results
    settings: dict[str, str]  # the FLASH_ATTN_COMPAT_ variables that are set


@dataclass(frozen=True)
class TypicalCall:
    """A call as models make it: the backend that would serve it, and each backend's reasons to decline it."""

    name: str
    backend: str | None
    reasons: dict[str, list[str]]


@dataclass(frozen=True)
class Name:
    """The package that `import flash_attn` finds here, and the result of each way to look for it."""

    answered_by: str
    real_location: str | None
    real_version: str | None
    real_unusable_because: str | None
    installed_in: list[str]
    looks: dict[str, str]


@dataclass(frozen=True)
class Report:
    version: str
    machine: Machine
    calls: list[TypicalCall]
    sdpa: dict[str, str]  # whether F.scaled_dot_product_attention uses our kernels, and for which typical calls
    flex: dict[str, str]  # whether torch.nn.attention.flex_attention uses our kernels
    checks: list[Check]
    faults: list[str]  # kernels that ended a process here and are refused since
    name: Name

    @property
    def healthy(self) -> bool:
        """Whether every check passed and each typical call has a backend."""
        return all(check.passed for check in self.checks) and all(call.backend for call in self.calls)


def examine(tell: Callable[[Machine], None] = lambda machine: None) -> Report:
    """Examine this machine for a few seconds. tell: called with the machine before anything runs on its GPU"""
    device = _choose_device()
    machine = _examine_machine(device)
    tell(machine)
    calls: list[TypicalCall] = []
    sdpa: dict[str, str] = {}
    checks: list[Check] = []
    labels = _list_labels(device)
    results = run_in_children(len(labels), _run_steps, device) if may_break(device.type) else _run_steps(0, device)
    for (backend, case), result in zip(labels, results):
        if isinstance(result, Ended):
            checks.append(Check(backend, case, False, result.how))
        elif isinstance(result, list):
            calls = result
        elif isinstance(result, dict):
            sdpa = result
        elif result is not None:
            checks.append(result)
    version, flex = flash_attn_compat.__version__, _explain_flex(device)
    return Report(version, machine, calls, sdpa, flex, checks, faults.list_reasons(), _examine_name())


_Result = list[TypicalCall] | dict[str, str] | Check | None


def _list_labels(device: torch.device) -> list[tuple[str, str]]:
    """Return the backend and case of each step of ``_run_steps``, to name a step that ended its process."""
    explained = [("dispatch", "typical calls"), ("dispatch", "F.scaled_dot_product_attention")]
    return [*explained, *((part.backend, part.name) for part in self_check.list_parts(device))]


def _run_steps(first: int, device: torch.device) -> Iterator[_Result]:
    """Yield the results of the steps that may break a GPU's context, from number ``first`` on."""
    parts = [partial(self_check.check_part, part, device) for part in self_check.list_parts(device)]
    steps: list[Callable[[], _Result]] = [partial(_explain_calls, device), partial(_explain_sdpa, device), *parts]
    yield from (step() for step in steps[first:])


def to_json(report: Report) -> str:
    """Return the report as one JSON object."""
    return json.dumps({**asdict(report), "healthy": report.healthy}, indent=2)


def to_text(report: Report) -> str:
    """Return the report as text for a terminal."""
    return f"{format_machine(report.machine)}\n\n{format_rest(report)}"


def format_machine(machine: Machine) -> str:
    """Return the first part of the text, which needs no call on the GPU."""
    return _sections({f"flash-attn-compat {flash_attn_compat.__version__}": [], "Machine": _format_facts(machine)})


def format_rest(report: Report) -> str:
    """Return the text after ``format_machine``."""
    refused = {"Kernels that are refused here": [line for fault in report.faults for line in _wrap("  ", fault)]}
    return _sections(
        {
            "What would serve calls like these here (found without running them)": _format_columns(
                {f"{number} {call.name}": call.backend or "NOTHING" for number, call in enumerate(report.calls, 1)}
            ),
            "Backends, in order of preference": _format_columns(_format_backends(report.calls)),
            "F.scaled_dot_product_attention": _format_columns(report.sdpa),
            "torch.nn.attention.flex_attention": _format_columns(report.flex),
            _CHECKS: _format_checks(report.checks),
            **(refused if report.faults else {}),
            "The name flash_attn": _format_name(report.name),
            "All well." if report.healthy else f"Something is wrong: see NOTHING and FAIL above. {_ADVICE}": [],
        }
    )


def _sections(sections: dict[str, list[str]]) -> str:
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections.items())


def _format_facts(machine: Machine) -> list[str]:
    code = "yes" if machine.has_code_for_device else "NO: this PyTorch cannot run on this GPU"
    hint = "; no GPU or no driver found" if machine.built_for and machine.device == "cpu" else ""
    facts = {
        "python": f"{machine.python}, {machine.system}",
        "torch": machine.torch,
        "device": f"{machine.device} ({machine.device_name})",
        "capability": machine.capability or "none (not a CUDA device)",
        "code for it": f"{code} (built for {', '.join(machine.built_for) or 'CPU only'}{hint})",
        "own kernels": machine.kernels[0],
        **machine.settings,
    }
    return [*_format_columns(facts), *(f"    {line}" for line in machine.kernels[1:])]


def _format_checks(checks: list[Check]) -> list[str]:
    widths = [max((len(text) for text in column), default=0) for column in zip(*((c.backend, c.case) for c in checks))]
    return [
        f"  {'ok  ' if c.passed else 'FAIL'}  {c.backend:{widths[0]}}  {c.case:{widths[1]}}  {c.detail}" for c in checks
    ]


def _format_name(name: Name) -> list[str]:
    facts = {"answered by": name.answered_by}
    if name.real_location:
        state = f"cannot serve: {name.real_unusable_because}" if name.real_unusable_because else "works here"
        facts["real flash-attn"] = f"{name.real_version or 'version unknown'} in {name.real_location}; {state}"
    facts["installed in"] = ", ".join(name.installed_in) or "nowhere (flash-attn-compat install)"
    return _format_columns({**facts, **name.looks})


def _format_backends(calls: list[TypicalCall]) -> dict[str, str]:
    """Return for each backend how many calls it serves, and its reasons to decline, each with the calls' numbers."""
    rows = {}
    for name in dict.fromkeys(name for call in calls for name in call.reasons):
        declined: dict[str, list[str]] = {}
        for number, call in enumerate(calls, 1):
            for reason in call.reasons.get(name, []):
                declined.setdefault(reason, []).append(str(number))
        served = sum(call.backend == name for call in calls)
        able = sum(not call.reasons.get(name, [""]) for call in calls)
        counts = [f"serves {served} of these calls"] if served else [f"could serve {able} of them"] if able else []
        reasons = [
            reason if len(numbers) == len(calls) else f"{reason} (call{'s' * (len(numbers) > 1)} {', '.join(numbers)})"
            for reason, numbers in declined.items()
        ]
        rows[name] = "; ".join([*counts, *reasons])
    return rows


def _format_columns(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    lines = []
    for label, text in rows.items():
        head = f"  {label:{width}}  "
        lines += _wrap(head, text) or [head]
    return lines


def _wrap(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=head, subsequent_indent=" " * len(head))


def _choose_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _examine_machine(device: torch.device) -> Machine:
    build = (torch.version.cuda and f"CUDA {torch.version.cuda}") or (torch.version.hip and f"ROCm {torch.version.hip}")
    capability, built_for, has_code = None, _find_architectures(), True
    device_name = platform.processor() or platform.machine()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        device_name = properties.name
        if torch.version.hip:
            has_code = getattr(properties, "gcnArchName", "").split(":")[0] in built_for
        else:
            has_code = has_code_for((properties.major, properties.minor), built_for)
            capability = f"{properties.major}.{properties.minor}"
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=f"{torch.__version__} ({build or 'no CUDA'})",
        device=str(device),
        device_name=device_name,
        capability=capability,
        built_for=built_for,
        has_code_for_device=has_code,
        kernels=describe_kernels(device),
        settings={name: value for name, value in sorted(os.environ.items()) if name.startswith(settings.PREFIX)},
    )


def _find_architectures() -> list[str]:
    """Return the GPU architectures of this PyTorch build, even without a driver; empty for a CPU build."""
    if torch.cuda.is_available():
        return torch.cuda.get_arch_list()
    architectures = getattr(torch._C, "_cuda_getArchFlags", None)  # get_arch_list returns none without a driver
    if architectures is not None:
        return str(architectures() or "").split()
    return ["MPS"] if torch.backends.mps.is_built() else []


def describe_kernels(device: torch.device) -> list[str]:
    """Return lines on our kernels' compiler and cache folder and the tuning results, or why they cannot run here."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ["none: they are for NVIDIA GPUs"]
    reason = nvrtc.decline_reason()
    if reason is not None:
        return [f"none: {reason}"]
    index = torch.cuda.current_device() if device.index is None else device.index
    version, driver = (".".join(map(str, each)) for each in (nvrtc.compiler().version, nvrtc.driver().version))
    compiler = f"for {nvrtc.target(index)} by NVRTC {version}, driver for CUDA {driver}"
    gpu = str(settings.gpu(device))
    advice = ["this GPU has no tensor cores: use float32 there"] if lacks_tensor_cores(gpu) else []
    return [f"{compiler}, kept in {kernel_files.describe_folder()}", *advice, *tuned.summarize(gpu)]


def has_code_for(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a binary built for these architectures (sm_75, compute_90) runs on a GPU of this capability.

    Machine code (sm) runs on capabilities of the same major version and at least its minor one. Drivers compile
    compute code for any later GPU.
    """
    for architecture in built_for:
        kind, _, digits = architecture.partition("_")
        digits = digits.rstrip("af")  # sm_90a, for 9.0 alone, counts as sm_90
        if not digits.isdigit():
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= capability:
            return True
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
    return False


def _explain_calls(device: torch.device) -> list[TypicalCall]:
    half = torch.float16 if device.type != "cpu" else torch.bfloat16

    def tensor(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.empty(shape, dtype=half, device=device, requires_grad=grad)

    def lengths(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q = tensor(2, 512, 8, 64, grad=True)
    slopes = torch.rand(8, dtype=torch.float32, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "training a causal language model": lambda: flash_attn_compat.flash_attn_func(q, q, q, causal=True),
        "training on packed sequences": lambda: flash_attn_compat.flash_attn_varlen_qkvpacked_func(
            tensor(1024, 3, 4, 32, grad=True), lengths(0, 300, 1024), 724
        ),
        "a sliding window with grouped heads and softcap": lambda: flash_attn_compat.flash_attn_func(
            q, tensor(2, 512, 2, 64), tensor(2, 512, 2, 64), causal=True, window_size=(127, 0), softcap=30.0
        ),
        "decoding with a KV cache": lambda: flash_attn_compat.flash_attn_with_kvcache(
            tensor(4, 1, 8, 128),
            tensor(4, 1024, 2, 128),
            tensor(4, 1024, 2, 128),
            cache_seqlens=lengths(9, 80, 700, 1024),
        ),
        "decoding with a KV cache of 8-bit floats": lambda: flash_attn_compat.flash_attn_with_kvcache(
            tensor(4, 1, 8, 128),
            tensor(4, 1024, 2, 128).to(torch.float8_e4m3fn),
            tensor(4, 1024, 2, 128).to(torch.float8_e4m3fn),
            cache_seqlens=lengths(9, 80, 700, 1024),
            k_descale=0.5,
            v_descale=0.5,
        ),
        "training with ALiBi and dropout": lambda: flash_attn_compat.flash_attn_func(
            q, q, q, dropout_p=0.1, causal=True, alibi_slopes=slopes
        ),
    }
    explained = {f"{name} ({dtype_name(half)})": flash_attn_compat.explain(call) for name, call in calls.items()}
    return [TypicalCall(name, each.backend, each.reasons) for name, each in explained.items()]


def _explain_sdpa(device: torch.device) -> dict[str, str]:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16, device=device)

    q, k, last = tensor(2, 8, 1024, 64), tensor(2, 2, 1024, 64), tensor(2, 8, 1, 64)
    seen = torch.ones(1024, 1024, dtype=torch.bool, device=device)
    sdpa = F.scaled_dot_product_attention
    calls: dict[str, Callable[[], Any]] = {
        "causal": lambda: sdpa(q, q, q, is_causal=True),
        "grouped heads": lambda: sdpa(q, k, k, is_causal=True, enable_gqa=True),
        "a new token": lambda: sdpa(last, k, k, enable_gqa=True),
        "a mask": lambda: sdpa(q, q, q, attn_mask=seen),
    }
    policy = override.active_policy()
    rows = {"switched on": "no (patch(sdpa=True), run --sdpa, install --sdpa)" if policy is None else "yes"}
    with override.sdpa():
        for name, call in calls.items():
            try:
                explanation = flash_attn_compat.explain(call)
            except ValueError:  # the call did not reach our operator
                return {**rows, "here": "PyTorch's own: ours is for NVIDIA GPUs"}
            reasons = "; ".join(explanation.reasons["fused"])
            rows[name] = f"PyTorch's own: {reasons}" if reasons else "our kernels, where it is switched on"
    return rows


def _explain_flex(device: torch.device) -> dict[str, str]:
    if flex_override.find_old_version() is not None:
        return {"here": f"PyTorch's own: ours needs PyTorch 2.6, and this is {torch.__version__}"}
    importlib.import_module("torch.nn.attention.flex_attention")  # `install --flex` takes effect at this import
    is_on = flex_override.active_policy() is not None
    reasons = "; ".join(device_reasons(Policy(), device))
    return {
        "switched on": "yes" if is_on else "no (patch(flex=True), run --flex, install --flex)",
        "here": f"PyTorch's own: {reasons}" if reasons else "our kernels, where it is switched on",
    }


def _examine_name() -> Name:
    real = installed_package.find_real()
    return Name(
        answered_by=_describe_answer(real),
        real_location=real.location if real else None,
        real_version=real.version if real else None,
        real_unusable_because=real.unusable_because if real else None,
        installed_in=[str(dist_info.parent) for dist_info in install.installed()],
        looks=_collect_looks(),
    )


def _describe_answer(real: RealFlashAttn | None) -> str:
    if installed.swapped_package() is not None:
        return "the real flash-attn, running on flash_attn_compat's functions (patched)"
    spec = installed.find_first_spec()
    if is_stand_in_spec(spec):
        patched = spec is not None and Path(spec.origin or "").is_relative_to(SITE)
        return f"flash_attn_compat ({'patched, here or by the parent process' if patched else 'installed'})"
    return "nothing yet: patch(), run or install give it" if real is None else "the real flash-attn"


def _collect_looks() -> dict[str, str]:
    """Return the result of each way to look for flash_attn, named with clients that use it."""
    looks: dict[str, Callable[[], Any]] = {
        "find_spec (diffusers, axolotl)": lambda: getattr(importlib.util.find_spec("flash_attn"), "origin", "nothing"),
        "metadata (TransformerEngine, gpt-neox)": lambda: importlib.metadata.version("flash-attn"),
        "packages_distributions (transformers 5)": lambda: (
            ", ".join(importlib.metadata.packages_distributions().get("flash_attn", [])) or "nothing"
        ),
        "a child process (torchrun, accelerate)": _child_sees,
        "transformers": _transformers_sees,
    }
    return {name: _describe_result(look) for name, look in looks.items()}


def _describe_result(look: Callable[[], Any]) -> str:
    try:
        return str(look())
    except importlib.metadata.PackageNotFoundError:
        return "nothing"
    except Exception as error:  # noqa: BLE001  the error is the result
        return f"{type(error).__name__}: {error}"


def _child_sees() -> str:
    code = "import importlib.util as u; print(getattr(u.find_spec('flash_attn'), 'origin', 'nothing'))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return child.stdout.strip() or "nothing"


def _transformers_sees() -> str:
    if importlib.util.find_spec("transformers") is None:
        return "not installed"
    from transformers.utils import is_flash_attn_2_available

    version = importlib.metadata.version("transformers")
    return f"{version}: flash_attention_2 is {'available' if is_flash_attn_2_available() else 'not available'}"
