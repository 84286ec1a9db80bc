"""verify away from its clone: from the wheel, over a user's file, and with kernels that decline."""

from __future__ import annotations

import importlib.abc
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.tools.interpreters import REPOSITORY, forked
from verify import EXTRA
from verify.cli import build_parser, main
from verify.errors import UsageError
from verify.implementations import declines, imported
from verify.recorded import ABSENT

CASES = ["--quick", "--device", "cpu", "-k", "mqa_cross,func causal gqa"]
KERNEL = """
from beside import attention

def right(q, k, v, causal=False):
    return attention(q, k, v, causal)

def wrong(q, k, v, causal=False):
    return attention(q, k, v, False)
"""
BESIDE = """
from torch.nn.functional import scaled_dot_product_attention as sdpa

def attention(q, k, v, causal):
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    return sdpa(q, k, v, is_causal=causal).transpose(1, 2)
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> str:
    """A user's file, which imports a neighbouring file."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    folder = tmp_path / "somewhere else"
    folder.mkdir()
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "beside.py").write_text(BESIDE)
    return str(folder / "kernel.py")


@pytest.fixture
def wheel(tmp_path) -> Path:
    """The files of an unpacked wheel: the package with verify and without recorded answers."""
    site, left = tmp_path / "site-packages", shutil.ignore_patterns("__pycache__", "recorded_answers")
    shutil.copytree(Path(REPOSITORY, "flash_attn_compat"), site / "flash_attn_compat", ignore=left)
    shutil.copytree(Path(REPOSITORY, "verify"), site / "flash_attn_compat/verify", ignore=left)
    return site


def test_the_command_of_a_wheel_judges_a_kernel_of_the_folder_it_is_called_in(wheel, kernel):
    code = f"""
import os, sys
sys.path[:] = [{str(wheel)!r}, *(p for p in sys.path if p not in ("", {REPOSITORY!r}))]
os.chdir({str(Path(kernel).parent)!r})
from flash_attn_compat.cli import main
codes = [main(["verify", "--implementation", name, "--device", "cpu", "-k", "func causal gqa fp32"])
         for name in ("kernel:right", "kernel.py:right", "kernel.py:wrong")]
codes.append(main(["verify", "locate", "verify.planted:right", "--n", "32", "--heads", "1", "--batch", "1"]))
assert "verify" not in sys.modules
sys.exit(0 if codes == [0, 0, 1, 0] and main(["verify", "--nonsense"]) else 7)
"""
    done = forked(code)
    assert done.returncode == 2 and "flash-attn-compat verify: unrecognized arguments" in done.stderr, done.stderr
    assert " ".join(done.stdout.split()).count(ABSENT) == 3


def test_a_file_of_the_current_folder_that_is_named_like_a_library_is_not_run(wheel, tmp_path):
    """Judging a kernel in a folder of downloads runs no other file there."""
    for name in ("torch", "rich", "einops"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the downloaded file ran')")
    code = f"""
import os, sys
sys.path[:] = [{str(wheel)!r}, *(p for p in sys.path if p not in ("", {REPOSITORY!r}))]
before = list(sys.path)
class Watch:
    def find_spec(name, path=None, target=None):
        if name == "flash_attn_compat.verify.cli":  # which imports torch
            assert sys.path == [*before, {str(tmp_path)!r}], sys.path
sys.meta_path.insert(0, Watch)
os.chdir({str(tmp_path)!r})
from flash_attn_compat.cli import main
sys.exit(0 if main(["verify", "--device", "tpu"]) == 2 else 7)
"""
    done = forked(code)
    assert done.returncode == 0 and "no device 'tpu' here" in done.stderr, done.stderr


def test_a_folder_of_a_judged_file_is_searched_last_once_the_file_is_loaded(kernel):
    imported(f"{kernel}:right")
    assert sys.path[-1] == str(Path(kernel).parent) not in sys.path[:-1]


def test_a_clone_holds_kernels_against_the_recorded_answers_and_says_nothing_of_their_absence(capsys):
    assert main([*CASES, "--implementation", "tests.verify.mutants:correct"]) == 0
    shown = capsys.readouterr().out
    assert "recorded answers" in shown and ABSENT not in shown


def test_an_absent_library_of_the_extra_ends_in_one_line_that_names_the_extra(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rich", "verify")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without("rich"), *sys.meta_path])
    from verify.__main__ import main as program

    assert program(["--quick"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rich" in line and line.endswith(EXTRA) and EXTRA == 'pip install "flash-attn-compat[verify]"'


class Without(importlib.abc.MetaPathFinder):
    """As if this were not installed."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def test_the_bare_help_shows_the_usual_options(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--implementation", "--quick", "--backend", "--html", "locate"))


# ---- a file of the user's --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("wrong", 1)])
def test_a_function_of_a_file_is_judged_and_neighbouring_files_are_importable(kernel, name, code, capsys):
    judged = ["--implementation", f"{kernel}:{name}", "--quick", "--device", "cpu", "-k", "func causal gqa fp32"]
    assert main(judged) == code
    assert main(["locate", f"{kernel}:{name}", "--causal", "--n", "32", "--heads", "1", "--batch", "1"]) == code


@pytest.mark.parametrize(
    ("suffix", "part"),
    [("kernel.py", "FileNotFoundError"), ("sub.py", "planted"), ("there.py:absent", "has no 'absent'")],
)
def test_a_file_that_cannot_be_used_ends_in_one_line(suffix, part, tmp_path):
    (tmp_path / "sub.py").write_text("raise ValueError('planted')")
    (tmp_path / "there.py").write_text("")
    with pytest.raises(UsageError, match=part):
        imported(str(tmp_path / suffix))


# ---- to decline is not to be wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (NotImplementedError(), True),
        (ValueError("head_dim 52 is not supported"), True),
        (AssertionError("Only fp16 and bf16 are supported"), True),
        (RuntimeError("this kernel doesn't support causal"), True),
        (RuntimeError("windows: not implemented yet"), True),
        (AssertionError(), False),
        (ValueError("head_dim must be 64"), False),
        (RuntimeError("CUDA error: operation not supported"), False),
        (RuntimeError("cublasGemmEx: CUBLAS_STATUS_NOT_SUPPORTED"), False),
        (RuntimeError("Triton Error [CUDA]: operation not supported"), False),
    ],
    ids=str,
)
def test_an_error_that_names_an_unsupported_feature_counts_as_declined(error, counts):
    assert declines(error) is counts


def half_only(q, k, v, causal=False):
    if q.dtype == torch.float32:
        raise ValueError("float32 is not supported\nand more")
    if causal:
        raise ZeroDivisionError("planted")
    from tests.verify.mutants import correct

    return correct.flash_attn_func(q, k, v)


def test_declined_cases_are_counted_with_reasons_beside_wrong_ones(tmp_path, capsys):
    saved = tmp_path / "a.json"
    given = ["--implementation", "tests.verify.test_travels:half_only", "--forward-only", "--json", str(saved)]
    assert main([*CASES, *given]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    verdicts = {
        row["case"]: (row["verdict"], row["note"]) for row in json.loads(saved.read_text(encoding="utf-8"))["rows"]
    }
    assert verdicts["mqa_cross"][0] == "pass"
    assert verdicts["func causal gqa fp16"] == ("FAIL", "ZeroDivisionError: planted")
    assert verdicts["func causal gqa fp32"] == ("declined", "float32 is not supported")
    assert "declined: 1 x float32 is not supported" in shown and "a case counts as declined, not as wrong, if" in shown


WITHOUT_GRADIENTS = "gradients not judged: 5 answers have none (out has no gradient); --gradients counts that as wrong"


def test_a_right_kernel_without_gradients_passes_and_one_line_says_that_they_were_not_judged(capsys):
    assert main([*CASES, "--implementation", "tests.verify.test_travels:detached"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("out has no gradient") == 1 and WITHOUT_GRADIENTS in shown
    assert "PASS: 5 of 5" in shown and "gradients" in shown.partition("not judged: head_dim")[2]


def test_a_kernel_that_must_have_gradients_is_wrong_without_them(capsys):
    assert main([*CASES, "--implementation", "tests.verify.test_travels:detached", "--gradients"]) == 1
    assert "dq missing: out has no gradient" in " ".join(capsys.readouterr().out.split())


def detached(q, k, v, causal=False):
    from tests.verify.mutants import correct

    return correct.flash_attn_func(q, k, v, causal=causal).detach()


@pytest.mark.parametrize(
    ("path", "half"),
    [
        ("verify.planted:half_inputs", True),
        ("verify.planted:bfloat16_throughout", True),
        ("tests.verify.test_travels:leaks", False),
        ("tests.verify.test_travels:too_large", False),
        ("verify.planted:right", None),
    ],
)
def test_a_kernel_that_is_right_in_half_precision_only_is_called_so(path, half, capsys):
    chosen = ["--quick", "--device", "cpu", "-k", "func causal gqa,sizes gqa", "--forward-only"]
    code = main([*chosen, "--implementation", path])
    shown = " ".join(capsys.readouterr().out.split())
    assert code == (half is not None)
    assert ("it computes in half precision, or rounds to it" in shown) is bool(half)


def too_large(q, k, v, causal=False):
    """By less than bf16 may be off."""
    from verify.planted import right

    return 1.01 * right(q, k, v, causal=causal)


def leaks(q, k, v, causal=False):
    """1e-4 of the neighbouring head, which is less than fp16 rounds away, but where that head is large."""
    from verify.planted import right

    out = right(q, k, v, causal=causal)
    return out + 1e-4 * out.roll(1, 2)
