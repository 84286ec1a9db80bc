"""Scripts for a GPU's minutes, the fuzzer's command line, and tests that act out a GPU on every build of PyTorch."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import flash_attn_compat
from flash_attn_compat import flash_attn_interface
from flash_attn_compat.backends.fused.choosing import enumeration, variants
from tests import fused_coverage, fuzz, gpu, sanitize
from tests.forms.plain import some
from tests.fuzz import Failure, Plan, main, run_all, shrink
from tests.gpu import Part
from tests.kernels import fused_on_cpu
from tests.sdpa import fuzz as masked_fuzz
from tests.sdpa import originals
from tests.tools.interpreters import CAN_FORK, REPOSITORY, forked
from tests.verify import mutants
from verify.call import solve
from verify.problems import Problem


def python(code: str, seconds: int = 60) -> Part:
    return Part("part", [sys.executable, "-c", code], {"SAID_BEFORE": "4"}, seconds)


def test_every_part_runs_a_module_that_is_there(tmp_path: Path) -> None:
    parts = list(gpu.parts(3, tmp_path))
    assert len({part.name for part in parts}) == len(parts) > 12
    for part in parts:
        assert part.command[:2] == [sys.executable, "-m"] and importlib.util.find_spec(part.command[2]), part
        assert part.stops == (part.command[2] in ("tests.fuzz", "tests.sdpa.fuzz", "tests.sanitize")), part


SAYS_WHEN = "import sys; print(sys.argv[sys.argv.index('--seconds') + 1], 'findings')"
CODES = {
    "passed": ("print('5 passed')", False, {"ok": True, "code": 0, "said": ["5 passed"], "failures": []}),
    "failed": ("print('FAILED one\\n5 passed'); exit(3)", False, {"ok": False, "code": 3, "failures": ["FAILED one"]}),
    "can stop": (SAYS_WHEN, True, {"ok": True, "code": 0, "said": ["360 findings"]}),
}


@pytest.mark.parametrize("name", CODES)
def test_a_part_reports_its_verdict_and_its_findings(name: str, tmp_path: Path) -> None:
    code, stops, expected = CODES[name]
    found = gpu.run(python(code)._replace(stops=stops), 600, tmp_path)
    assert {key: found[key] for key in expected} == expected
    assert (tmp_path / "part.log").read_text().splitlines()[-1] == found["said"][-1]  # type: ignore[index]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes have no groups here")
def test_a_part_that_takes_too_long_ends_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, time; print(os.fork(), flush=True); time.sleep(3600)"
    log = tmp_path / "part.log"

    class LateOnceStarted(subprocess.Popen[bytes]):
        """Out of time as soon as it has said all, however long that takes."""

        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None:
                if len(log.read_text().split()) == 2:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.01)
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", LateOnceStarted)
    found = gpu.run(python(code), 600, tmp_path)
    assert found["code"] == "out of time" and found["ok"] is False
    child = max(int(line) for line in log.read_text().split())
    deadline = time.monotonic() + 600
    while _is_running(child):
        assert time.monotonic() < deadline, "what it had started runs on"
        time.sleep(0.01)


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z" if os.path.isdir("/proc/self") else False
    except OSError:
        return False


def test_parts_without_time_are_told_and_are_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--minutes", "0", "--only", "fuzz", "--out", str(tmp_path)]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(told) == 4 and all(one["code"] == "no time left" for one in told)


@pytest.mark.parametrize(
    "said", ["Invalid __global__ read of size 16 bytes", "Barrier error detected. Divergent thread(s) in block"]
)
def test_a_finding_in_a_kernel_of_ours_is_told_from_others(said: str) -> None:
    lines = [said, "    at dkdv+0x4f0", "    at cutlass::Kernel+0x10"]
    report = "\n".join(f"========= {line}" for line in lines)
    assert sanitize.findings(report) == ["=========     at dkdv+0x4f0"]


def test_findings_before_a_check_that_hangs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho '=========     at dkdv+0x4f0'\nexec sleep 3600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    class LateOnceFound(subprocess.Popen[bytes]):
        """Out of time as soon as it has said something, however long that takes."""

        def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
            while True:
                try:
                    return super().communicate(input, 0.05)
                except subprocess.TimeoutExpired as late:
                    if late.stdout:
                        raise

    monkeypatch.setattr(subprocess, "Popen", LateOnceFound)
    assert len(sanitize.findings(sanitize.run("racecheck", 0, 1, 600.0))) == 1


def test_shards_of_the_sanitizer_take_turns_on_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [sanitize.device_of(shard) for shard in range(3)] == ["3", "5", "3"]


def test_the_sanitizers_states_are_states() -> None:
    from tests.forms.caller_state import states

    assert set(sanitize.STATES) <= {state.name for state in states()}


def _zeros(*shape: int, generator: torch.Generator | None = None, **form: Any) -> torch.Tensor:
    return torch.zeros(*shape, **form)


@pytest.mark.parametrize("number", some([75, 90], 2))
def test_the_coverage_launches_every_variant_that_it_compiles(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch, number, one_tile=True)  # which computes nothing, so zeros will do
    monkeypatch.setattr(torch, "randn", _zeros)
    kinds = list(fused_coverage.kinds(number))
    with flash_attn_compat.use_backend("fused"):
        for kind in kinds:
            for problem in fused_coverage.problems(kind).values():
                call = problem.build()
                solve(getattr(flash_attn_interface, call.fn), call)
    assert {launch.variant for launch in launches.seen} == set(enumeration.made_for(kinds))


@originals.needs_grouped_heads
@pytest.mark.parametrize("number", [75, 90])
def test_so_it_does_of_masks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch, number, one_tile=True)
    kinds = list(fused_coverage.masked_kinds(number))
    with originals.override_on(), flash_attn_compat.use_backend("fused"):
        for kind in kinds:
            problem = fused_coverage.masked_problem(kind)
            out, _ = masked_fuzz.by_operator(
                problem, *(x.requires_grad_() for x in masked_fuzz.tensors(problem, "cpu"))
            )
            out.backward(torch.ones_like(out))
    assert {launch.variant for launch in launches.seen} == set(enumeration.made_for(kinds))


def test_the_sanitizers_entries_are_all_there_are() -> None:
    assert set(sanitize.ENTRIES.split("|")) >= variants.MAKERS.keys() - {"decode_append"}


@originals.needs_grouped_heads
def test_a_wrong_answer_under_a_mask_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.record(monkeypatch)  # where nobody computes anything
    kind = next(iter(fused_coverage.masked_kinds(75)))
    with pytest.raises(AssertionError, match="out"):
        fused_coverage._check_masked(fused_coverage.masked_problem(kind), torch.device("cpu"))


# ---------------------------------------------------------------- the fuzzer's command line


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, dict]:
    code = main([*arguments, "--backend", "reference"])
    printed = capsys.readouterr().out
    return code, printed, json.loads(printed.splitlines()[-1])


def test_the_last_line_sums_up_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, found = run(capsys, "--problems", "12")
    assert code == 0
    assert (found["problems"], found["served"], found["failures"]) == (12, 12, 0)
    of_reference = found["backends"]["reference"]
    assert of_reference["served"] == 12 and 0 < float(of_reference["worst"]) < 1


def test_it_stops_after_so_many_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--served", "5")[2]["problems"] == 5


def test_it_stops_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--problems", "100000", "--seconds=-1")[2]["problems"] == 1


class DiesOfProblem3(Plan):
    def problem(self, seed: int) -> Problem:
        if seed == 3 and multiprocessing.parent_process():
            os._exit(9)
        return super().problem(seed)


def test_processes_share_the_problems_and_outlive_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if CAN_FORK:  # three copies of one process that has imported this module
        monkeypatch.setattr(fuzz, "_START", "forkserver")
        multiprocessing.set_forkserver_preload([__name__])
    total = run_all(DiesOfProblem3("cpu", ("reference",), None, None), range(8), 2, 1e9, 1e9, Console())
    assert (total.problems, total.served, [failure.seed for failure in total.failures]) == (8, 7, [3])


@pytest.fixture
def wrong_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_interface, "flash_attn_func", mutants.alibi_sign.flash_attn_func)


def test_a_failure_is_printed_as_one_line_that_repeats_it(
    wrong_alibi: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "found.json"
    code, printed, found = run(
        capsys, "--kind", "dense", "--dtype", "float32", "--problems", "12", "--show", "1", "--json", str(saved)
    )
    assert code == 1 and found["failures"] > 0
    assert len(json.loads(saved.read_text())["failures"]) == found["failures"]
    line = next(line for line in printed.splitlines() if "python -c" in line)
    words = shlex.split(line)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(words[words.index("-c") + 1])
    assert "failures=['" in told.getvalue()


def test_a_failure_is_made_small(wrong_alibi: None) -> None:
    large = Problem(seqlens_q=(20, 20), seqlens_k=(30, 30), nheads_k=2, head_dim=32, alibi="bh", causal=True,
                    sizes=((1.0, 1.0, 1e-3, 1.0), (1.0, 1.0, 1.0, 1.0)))  # fmt: skip
    small = shrink(Failure(0, "reference", large, ["out: error"]), "cpu", attempts=100)
    assert small.alibi and not small.sizes and len(small.seqlens_q) == 1 and small.head_dim == 8
    assert torch.tensor(small.seqlens_q).max() < 20


# ---------------------------------------------------------------- tests that act out a GPU

# Their fixtures hand CPU tensors to code for GPUs.
ACTING = (
    *(
        f"tests/answers/test_sdpa.py::test_{name}"
        for name in (
            "plain_and_causal_calls_are_served_where_the_trial_of_each_kind_is_right",
            "a_trial_that_is_wrong_or_raises_is_a_reason",
            "unsupported_calls_are_declined_without_a_smoke_test",
            "calls_in_a_capture_are_declined_before_a_smoke_test",
            "nvidias_gpus_are_left_to_others",
            "a_call_is_dispatched_to_it_and_its_memory_is_laid_out_as_the_trials",
            "declined_calls_go_to_chunked",
        )
    ),
    *(
        f"tests/kernels/test_verdicts.py::test_{name}"
        for name in (
            "a_card_without_them_is_told_of_tune_once_and_not_after_it",
            "explain_says_that_the_card_has_no_tensor_cores",
            "chunked_multiplies_in_fp32_on_a_card_without_tensor_cores",
            "doctor_reports_missing_tensor_cores_and_the_measured_speed",
        )
    ),
    "tests/observers/test_caller_state.py::test_a_device_is_waited_for_once_and_a_cpu_never",
    "tests/answers/test_others_kernels.py::test_a_flash_attn_that_is_switched_off_or_runs_on_ours_is_not_asked",
    "tests/answers/test_others_kernels.py::test_slopes_are_read_through_their_strides",
)
WITHOUT_DRIVER = """
def fail(*arguments):
    raise RuntimeError("Found no NVIDIA driver on your system")
torch.version.cuda = "13.0"
torch.backends.cuda.is_built = lambda: True
torch.cuda.is_available = lambda: False
torch.cuda.device_count = lambda: 0
"""
BESIDE_A_GPU = """
def fail(*arguments):
    raise AssertionError("a test that acts out a GPU asked the real one")
torch.version.cuda = "13.0"
torch.backends.cuda.is_built = torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_capability = lambda device=None: (9, 0)
"""
ASKING = "torch._C._cuda_getDevice = torch._C._cuda_isCurrentStreamCapturing = torch.cuda.current_device = fail"


@pytest.mark.skipif(not CAN_FORK, reason="a new interpreter for each would take a minute")
@pytest.mark.parametrize("build", [WITHOUT_DRIVER, BESIDE_A_GPU], ids=["CUDA without a driver", "beside a GPU"])
def test_tests_that_act_out_a_gpu_never_ask_a_real_one(build: str) -> None:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu", *ACTING]
    run = f"import os, sys, pytest; os.chdir({REPOSITORY!r}); sys.exit(pytest.main({options!r}))"
    answer = forked(f"import torch\n{build}\n{ASKING}\n{run}")
    assert answer.returncode == 0, answer.stdout + answer.stderr
