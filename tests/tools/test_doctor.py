"""doctor reports the machine and its faults, in text and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

import flash_attn_compat
from flash_attn_compat import backends, cli, doctor, isolation, self_check, settings
from flash_attn_compat.backends import sdpa
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.judging import faults
from flash_attn_compat.dispatch import call_cache
from tests.forms.support import write_package
from tests.sdpa import originals
from tests.tools.interpreters import CAN_FORK, REPOSITORY, forked_child

needs_fork = pytest.mark.skipif(not CAN_FORK, reason="processes cannot be copied here")


def first_backend() -> str:
    """Return the first backend that serves plain calls on a CPU."""
    return "chunked" if sdpa._LOSES_NAN else "sdpa"


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


def test_each_typical_call_finds_a_backend_that_is_checked_and_reasons_for_every_one(report):
    assert len(report.calls) == 6 and report.healthy
    for call in report.calls:
        assert call.reasons.keys() == {backend.name for backend in backends.BACKENDS}
        assert call.reasons[call.backend] == []
    able = {name for call in report.calls for name, against in call.reasons.items() if not against}
    assert {check.backend for check in report.checks} >= able and all(check.passed for check in report.checks)


def test_json_holds_the_whole_report(report):
    told = json.loads(doctor.to_json(report))
    assert told.keys() == {field.name for field in dataclasses.fields(report)} | {"healthy"}
    assert told["name"]["looks"].keys() == report.name.looks.keys()


def test_text_fits_a_terminal_and_says_a_reason_against_a_backend_once(report):
    text = doctor.to_text(report)
    lines = text.splitlines()
    assert report.machine.device in text and "All well." in text and max(map(len, lines)) <= 120
    for backend in backends.BACKENDS:
        assert sum(line.startswith(f"  {backend.name} ") for line in lines) == 1
    if report.machine.device == "cpu":
        assert report.machine.kernels == ["none: they are for NVIDIA GPUs"]
        assert sum("flash-attn is not installed" in line for line in lines) == 1
        assert any(line.split() == ["fused", "runs", "on", "CUDA", "GPUs", "only"] for line in lines)
        assert any(
            line.startswith(f"  {first_backend()} ") and re.search(r"serves \d of these", line) for line in lines
        )


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.5", reason="before PyTorch 2.5 its attention stays its own")
def test_doctor_names_the_backend_of_pytorchs_attention(report, monkeypatch):
    if report.machine.device == "cpu":
        assert report.sdpa.keys() == {"switched on", "here"}
    with originals.cpu_stand_ins(), originals.served(monkeypatch):
        told = doctor._explain_sdpa(torch.device("cpu"))
    calls = "causal", "grouped heads", "a new token", "a mask"
    assert told == {"switched on": "yes", **dict.fromkeys(calls, "our kernels, where it is switched on")}


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.6", reason="flex_attention on our kernels needs PyTorch 2.6")
def test_doctor_says_who_serves_flex_attention(report):
    assert report.flex["switched on"].startswith("no (patch(flex=True)")
    if report.machine.device == "cpu":
        assert report.flex["here"] == "PyTorch's own: it is on cpu, not on cuda"


def test_doctor_says_which_of_the_calls_a_reason_concerns(report):
    every, one, two = "no GPU", "no softcap", "no dropout"
    reasons = [[every], [every, one, two], [every, two]]
    calls = [doctor.TypicalCall(f"call {index}", None, {"mine": each}) for index, each in enumerate(reasons)]
    assert doctor._format_backends(calls) == {"mine": "no GPU; no softcap (call 2); no dropout (calls 2, 3)"}
    text = doctor.to_text(dataclasses.replace(report, calls=calls))
    assert "  2 call 1  NOTHING" in text


def test_a_backend_that_computes_wrong_is_told(monkeypatch):
    served = flash_attn_compat.explain(flash_attn_compat.flash_attn_func, *[torch.randn(1, 4, 1, 8)] * 3).backend
    original = flash_attn_compat.flash_attn_func
    wrong = lambda *inputs, **options: 1.01 * original(*inputs, **options)  # noqa: E731
    monkeypatch.setattr(flash_attn_compat, "flash_attn_func", wrong)
    failed = [check for check in self_check.check_all(torch.device("cpu")) if not check.passed]
    assert served in {check.backend for check in failed}


def test_a_backend_that_raises_is_told(monkeypatch, report):
    def broken(*inputs, **options):
        raise MemoryError("no room")

    monkeypatch.setattr(flash_attn_compat, "flash_attn_func", broken)
    checks = self_check.check_all(torch.device("cpu"))
    assert {check.detail for check in checks} == {"MemoryError: no room"}
    sick = dataclasses.replace(report, checks=checks)
    assert not sick.healthy and "FAIL" in doctor.to_text(sick)


def test_a_cuda_build_without_a_driver_is_told_with_the_gpus_that_it_is_built_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_75 sm_80", raising=False)
    machine = doctor._examine_machine(torch.device("cpu"))
    (line,) = [line for line in doctor._format_facts(machine) if "code for it" in line]
    assert line.endswith("yes (built for sm_75, sm_80; no GPU or no driver found)")


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="shown by a CPU build")
@pytest.mark.parametrize(("has_mps", "told"), [(False, "CPU only"), (True, "MPS; no GPU or no driver found")])
def test_doctor_names_a_build_without_cuda(has_mps, told, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: has_mps)
    machine = doctor._examine_machine(torch.device("cpu"))
    assert any(line.endswith(f"yes (built for {told})") for line in doctor._format_facts(machine))


def test_without_a_home_directory_the_doctor_says_where_kernels_could_be_kept(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CACHE", "~nobody-of-this-name/kernels")
    monkeypatch.setattr(torch.version, "hip", None)
    compiler, driver = SimpleNamespace(version=(12, 9)), SimpleNamespace(version=(13, 0))
    found = {"decline_reason": None, "compiler": compiler, "driver": driver, "target": "sm_75"}
    for name, value in found.items():
        monkeypatch.setattr(nvrtc, name, lambda *device, value=value: value)
    monkeypatch.setattr(settings, "gpu", lambda device: "Tesla T4")
    (first, *_) = doctor.describe_kernels(torch.device("cuda", 0))
    assert first.endswith("kept in no folder: there is no home directory: set FLASH_ATTN_COMPAT_CACHE to a folder")


@needs_fork
def test_a_kernel_that_ends_the_process_is_named_and_the_others_are_checked(monkeypatch, capsys):
    """As on a GPU, where a kernel that faults ends the process's use of it."""
    if torch.cuda.is_available():
        pytest.skip("doctor asks the GPU first, and a process that has used a GPU cannot be copied")
    check_part = self_check.check_part

    def fault(part, device):
        if (part.backend, part.case.name) == ("chunked", "full"):
            os.kill(os.getpid(), signal.SIGKILL)
        return check_part(part, device)

    monkeypatch.setattr(isolation, "_START", "fork")
    monkeypatch.setattr(doctor, "may_break", lambda device_type: True)
    monkeypatch.setattr(self_check, "check_part", fault)
    monkeypatch.setattr(
        faults, "list_reasons", lambda: ["dkdv broke a process's use of this GPU when tried: " + 30 * "x "]
    )
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert text.index("Machine") < text.index("What would serve") < text.index("Kernels that are refused here")
    failed = [line for line in lines if line[:1] == ["FAIL"]]
    assert [line[1:3] for line in failed] == [["chunked", "full,"]] * 2, "bf16 and fp32"
    assert all(line[-1] == "SIGKILL" for line in failed)
    passed = {line[1] for line in lines if line[:1] == ["ok"]}
    assert passed >= {"chunked", first_backend(), "reference"} and "docs/troubleshooting.md" in text.splitlines()[-1]


def test_the_machine_is_told_before_anything_runs(monkeypatch):
    class Stopped(Exception):
        pass

    def stop(device):
        raise Stopped

    told = []
    monkeypatch.setattr(doctor, "may_break", lambda device_type: False)
    monkeypatch.setattr(doctor, "_explain_calls", stop)
    with pytest.raises(Stopped):
        doctor.examine(told.append)
    assert [machine.device for machine in told] == [str(doctor._choose_device())]


def test_marks_of_ended_processes_are_removed_on_request(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(faults, "remove_marks", lambda: asked.append("forget") or 1)
    monkeypatch.setattr(doctor, "examine", lambda tell: asked.append("examine") or report_of_nothing())
    assert [cli.main(["doctor"]), cli.main(["doctor", "--again", "--json"])] == [0, 0]
    assert asked == ["examine", "forget", "examine"]


def report_of_nothing():
    machine = doctor.Machine("3", "Linux", "2", "cpu", "a CPU", None, [], True, ["none"], {})
    return doctor.Report("1", machine, [], {}, {}, [], [], doctor.Name("nothing", None, None, None, [], {}))


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((7, 5), ["sm_70", "sm_75", "sm_80"], True),
        ((7, 5), ["sm_70"], True),  # machine code runs on later minors of its major
        ((7, 5), ["sm_80", "sm_90"], False),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((12, 0), ["sm_80", "sm_90a"], False),
        ((9, 0), ["sm_90a"], True),
        ((7, 5), [], False),
    ],
)
def test_whether_a_binary_has_code_for_a_gpu(capability, built_for, expected):
    assert doctor.has_code_for(capability, built_for) is expected


def test_a_real_package_that_cannot_serve_is_named_with_its_reason(tmp_path):
    package = write_package(tmp_path, "raise OSError('libcudart.so.11.0: cannot open shared object file')\n")
    variables = {"PYTHONPATH": os.pathsep.join([REPOSITORY, str(tmp_path)])}
    code = "import json; from flash_attn_compat import doctor; print(json.dumps(vars(doctor._examine_name())))"
    answer = forked_child(code, variables)
    assert answer.returncode == 0, answer.stderr
    name = json.loads(answer.stdout)
    assert name["real_location"] == str(package)
    assert "OSError: libcudart.so.11.0" in name["real_unusable_because"]


def test_doctor_names_the_flash_attn_of_a_patched_process():
    with flash_attn_compat.patched():
        name = doctor.examine().name
    assert name.answered_by.startswith("flash_attn_compat (patched")
    assert name.looks["metadata (TransformerEngine, gpt-neox)"] == "2.8.3"
    assert name.looks["a child process (torchrun, accelerate)"].endswith("__init__.py")


def test_an_unknown_variable_warns_once_at_the_first_call(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_BAKEND", "sdpa")
    settings._warn_of_unknown.cache_clear()
    call_cache.forget()
    q = torch.randn(1, 4, 1, 8)
    with pytest.warns(UserWarning, match="BAKEND: did you mean FLASH_ATTN_COMPAT_BACKEND") as told:
        flash_attn_compat.flash_attn_func(q, q, q)
        call_cache.forget()
        flash_attn_compat.flash_attn_func(q, q, q)
    assert len(told) == 1
