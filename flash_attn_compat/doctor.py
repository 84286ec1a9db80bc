"""flash-attn-compat doctor: what this machine is, what serves here, whether it computes right, who sees flash_attn.

examine() gathers a Report of plain values; to_text and to_json show it. Nothing is changed or installed. What may break
a GPU's context runs in child processes, after the machine is known.
"""

from __future__ import annotations

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
from flash_attn_compat.backends.fused import cache, faults, nvrtc, tensor_cores, tuned
from flash_attn_compat.core.features import dtype_name
from flash_attn_compat.dropin import install, installed_package
from flash_attn_compat.installed import SITE, RealFlashAttn, is_stand_in_spec
from flash_attn_compat.isolation import Ended, in_children, may_break
from flash_attn_compat.self_check import Check
from flash_attn_compat.torch_sdpa import override

_ADVICE = "What to do: docs/troubleshooting.md"


@dataclass(frozen=True)
class Machine:
    python: str
    system: str
    torch: str
    device: str  # where the calls below would run: cuda:0, mps or cpu
    device_name: str
    capability: str | None
    built_for: list[str]  # the architectures that this PyTorch binary has code for
    has_code_for_device: bool
    kernels: list[str]  # this package's own: what compiles them, where they are kept, how fast they are
    settings: dict[str, str]  # the FLASH_ATTN_COMPAT_ variables that are set


@dataclass(frozen=True)
class TypicalCall:
    """A call as models make it: who would serve it, and what speaks against each other backend."""

    name: str
    backend: str | None
    reasons: dict[str, list[str]]


@dataclass(frozen=True)
class Name:
    """What answers to flash_attn here, and what the ways of looking for it find."""

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
    sdpa: dict[str, str]  # F.scaled_dot_product_attention: whether it is switched on, who would serve typical calls
    checks: list[Check]
    faults: list[str]  # kernels that ended a process here, and so are refused
    name: Name

    @property
    def healthy(self) -> bool:
        """Every backend that takes a call computes it right, and each typical call finds one."""
        return all(check.passed for check in self.checks) and all(call.backend for call in self.calls)


def examine(tell: Callable[[Machine], None] = lambda machine: None) -> Report:
    """Look at this machine; takes a few seconds. tell: gets the machine before anything runs on its GPU"""
    device = _device()
    machine = _machine(device)
    tell(machine)
    calls: list[TypicalCall] = []
    sdpa: dict[str, str] = {}
    checks: list[Check] = []
    labels = _labels(device)
    results = in_children(len(labels), _steps, device) if may_break(device.type) else _steps(0, device)
    for (asked, what), result in zip(labels, results):
        if isinstance(result, Ended):
            checks.append(Check(asked, what, False, result.how))
        elif isinstance(result, list):
            calls = result
        elif isinstance(result, dict):
            sdpa = result
        elif result is not None:
            checks.append(result)
    return Report(flash_attn_compat.__version__, machine, calls, sdpa, checks, faults.list_reasons(), _name())


_Result = list[TypicalCall] | dict[str, str] | Check | None


def _labels(device: torch.device) -> list[tuple[str, str]]:
    """Of each of ``_steps``: who is asked, and what."""
    whole = [("dispatch", "typical calls"), ("dispatch", "F.scaled_dot_product_attention")]
    return [*whole, *((part.backend, part.name) for part in self_check.parts(device))]


def _steps(first: int, device: torch.device) -> Iterator[_Result]:
    """What a report says that may take a GPU, from number ``first`` on."""
    parts = [partial(self_check.check_part, part, device) for part in self_check.parts(device)]
    steps: list[Callable[[], _Result]] = [partial(_typical_calls, device), partial(_sdpa, device), *parts]
    yield from (step() for step in steps[first:])


def to_json(report: Report) -> str:
    return json.dumps({**asdict(report), "healthy": report.healthy}, indent=2)


def to_text(report: Report) -> str:
    return f"{head(report.machine)}\n\n{rest(report)}"


def head(machine: Machine) -> str:
    """The first part of the text."""
    return _sections({f"flash-attn-compat {flash_attn_compat.__version__}": [], "Machine": _machine_lines(machine)})


def rest(report: Report) -> str:
    """The text behind ``head``."""
    refused = {"Kernels that are refused here": [line for fault in report.faults for line in _wrapped("  ", fault)]}
    return _sections(
        {
            "What would serve": _columns({call.name: call.backend or "NOTHING" for call in report.calls}),
            "Backends, in the order in which they are asked": _columns(_about_backends(report.calls)),
            "F.scaled_dot_product_attention": _columns(report.sdpa),
            "Self-check: error against fp64 (in brackets: of plain PyTorch in the same dtype)": _check_lines(
                report.checks
            ),
            **(refused if report.faults else {}),
            "The name flash_attn": _name_lines(report.name),
            "All well." if report.healthy else f"Something is wrong: see NOTHING and FAIL above. {_ADVICE}": [],
        }
    )


def _sections(sections: dict[str, list[str]]) -> str:
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections.items())


def _machine_lines(machine: Machine) -> list[str]:
    code = "yes" if machine.has_code_for_device else "NO: this PyTorch cannot run on this GPU"
    without = "; no GPU or no driver found" if machine.built_for and machine.device == "cpu" else ""
    facts = {
        "python": f"{machine.python}, {machine.system}",
        "torch": machine.torch,
        "device": f"{machine.device} ({machine.device_name})",
        "capability": machine.capability or "none (not a CUDA device)",
        "code for it": f"{code} (built for {', '.join(machine.built_for) or 'CPU only'}{without})",
        "own kernels": machine.kernels[0],
        **machine.settings,
    }
    return [*_columns(facts), *(f"    {line}" for line in machine.kernels[1:])]


def _check_lines(checks: list[Check]) -> list[str]:
    widths = [max((len(text) for text in column), default=0) for column in zip(*((c.backend, c.case) for c in checks))]
    return [
        f"  {'ok  ' if c.passed else 'FAIL'}  {c.backend:{widths[0]}}  {c.case:{widths[1]}}  {c.detail}" for c in checks
    ]


def _name_lines(name: Name) -> list[str]:
    facts = {"answered by": name.answered_by}
    if name.real_location:
        state = f"cannot serve: {name.real_unusable_because}" if name.real_unusable_because else "works here"
        facts["real flash-attn"] = f"{name.real_version or 'version unknown'} in {name.real_location}; {state}"
    facts["installed in"] = ", ".join(name.installed_in) or "nowhere (flash-attn-compat install)"
    return _columns({**facts, **name.looks})


def _about_backends(calls: list[TypicalCall]) -> dict[str, str]:
    """Of each backend how many of the calls it serves, and each reason against it once."""
    found = {}
    for name in dict.fromkeys(name for call in calls for name in call.reasons):
        reasons = dict.fromkeys(reason for call in calls for reason in call.reasons.get(name, []))
        served = sum(call.backend == name for call in calls)
        able = sum(not call.reasons.get(name, [""]) for call in calls)
        does = [f"serves {served} of these calls"] if served else [f"could serve {able} of them"] if able else []
        found[name] = "; ".join([*does, *reasons])
    return found


def _columns(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    lines = []
    for label, text in rows.items():
        head = f"  {label:{width}}  "
        lines += _wrapped(head, text) or [head]
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=head, subsequent_indent=" " * len(head))


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _machine(device: torch.device) -> Machine:
    build = (torch.version.cuda and f"CUDA {torch.version.cuda}") or (torch.version.hip and f"ROCm {torch.version.hip}")
    capability, built_for, has_code = None, _built_for(), True
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
        kernels=kernels(device),
        settings={name: value for name, value in sorted(os.environ.items()) if name.startswith(settings.PREFIX)},
    )


def _built_for() -> list[str]:
    """The GPU architectures of this PyTorch build, with or without a driver here; empty for a build for CPUs."""
    if torch.cuda.is_available():
        return torch.cuda.get_arch_list()
    architectures = getattr(torch._C, "_cuda_getArchFlags", None)  # get_arch_list answers none without a driver
    if architectures is not None:
        return str(architectures() or "").split()
    return ["MPS"] if torch.backends.mps.is_built() else []


def kernels(device: torch.device) -> list[str]:
    """What compiles and keeps this package's kernels, or why there are none, and then what is known of their speed."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ["none: they are for NVIDIA GPUs"]
    lacking = nvrtc.decline_reason()
    if lacking is not None:
        return [f"none: {lacking}"]
    index = torch.cuda.current_device() if device.index is None else device.index
    version, driver = (".".join(map(str, each)) for each in (nvrtc.compiler().version, nvrtc.driver().version))
    made = f"for {nvrtc.target(index).architecture} by NVRTC {version}, driver for CUDA {driver}"
    without = (
        [] if tensor_cores.stored_result(index) is not False else ["this GPU has no tensor cores: use float32 there"]
    )
    return [f"{made}, kept in {cache.describe_folder()}", *without, *tuned.summarize(str(settings.gpu(device)))]


def has_code_for(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Whether a binary built for these (sm_75, compute_90) runs on a GPU of this capability.

    Machine code runs within its major version from its minor on; compute_ is code that drivers translate for any
    later GPU.
    """
    for architecture in built_for:
        kind, _, digits = architecture.partition("_")
        digits = digits.rstrip("af")  # sm_90a: for that capability alone, which the comparison below allows too
        if not digits.isdigit():
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= capability:
            return True
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
    return False


def _typical_calls(device: torch.device) -> list[TypicalCall]:
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
        "training with ALiBi and dropout": lambda: flash_attn_compat.flash_attn_func(
            q, q, q, dropout_p=0.1, causal=True, alibi_slopes=slopes
        ),
    }
    explained = {f"{name} ({dtype_name(half)})": flash_attn_compat.explain(call) for name, call in calls.items()}
    return [TypicalCall(name, found.backend, found.reasons) for name, found in explained.items()]


def _sdpa(device: torch.device) -> dict[str, str]:
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
    found = {"switched on": "no (patch(sdpa=True), run --sdpa, install --sdpa)" if policy is None else "yes"}
    with override.sdpa():
        for name, call in calls.items():
            try:
                explanation = flash_attn_compat.explain(call)
            except ValueError:  # nobody was asked
                return {**found, "here": "PyTorch's own: ours is for NVIDIA GPUs"}
            because = "; ".join(explanation.reasons["fused"])
            found[name] = f"PyTorch's own: {because}" if because else "our kernels, where it is switched on"
    return found


def _name() -> Name:
    found = installed_package.find_real()
    return Name(
        answered_by=_who_answers(found),
        real_location=found.location if found else None,
        real_version=found.version if found else None,
        real_unusable_because=found.unusable_because if found else None,
        installed_in=[str(dist_info.parent) for dist_info in install.installed()],
        looks=_looks(),
    )


def _who_answers(found: RealFlashAttn | None) -> str:
    if installed.swapped() is not None:
        return "the real flash-attn, running on flash_attn_compat's functions (patched)"
    spec = installed.first_spec()
    if is_stand_in_spec(spec):
        patched = spec is not None and Path(spec.origin or "").is_relative_to(SITE)
        return f"flash_attn_compat ({'patched, here or by the parent process' if patched else 'installed'})"
    return "nothing: import flash_attn fails" if found is None else "the real flash-attn"


def _looks() -> dict[str, str]:
    """What each way of looking finds, named with clients that look that way."""
    looks: dict[str, Callable[[], Any]] = {
        "find_spec (diffusers, axolotl)": lambda: getattr(importlib.util.find_spec("flash_attn"), "origin", "nothing"),
        "metadata (TransformerEngine, gpt-neox)": lambda: importlib.metadata.version("flash-attn"),
        "packages_distributions (transformers 5)": lambda: (
            ", ".join(importlib.metadata.packages_distributions().get("flash_attn", [])) or "nothing"
        ),
        "a child process (torchrun, accelerate)": _child_sees,
        "transformers": _transformers_sees,
    }
    return {name: _answer(look) for name, look in looks.items()}


def _answer(look: Callable[[], Any]) -> str:
    try:
        return str(look())
    except importlib.metadata.PackageNotFoundError:
        return "nothing"
    except Exception as error:  # noqa: BLE001  it is the answer
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
