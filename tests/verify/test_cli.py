"""verify's command line, its files, and verify away from its clone: from a wheel, over a user's file."""

from __future__ import annotations

import ast
import graphlib
import importlib.abc
import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch

from flash_attn_compat.backends.fused.judging import faults
from flash_attn_compat.utils.testing import attention_ref
from tests.forms.support import check_refused_in_one_line, compare_quickly
from tests.kernels import fused_on_cpu
from tests.tools.interpreters import REPOSITORY, Answer, forked
from tests.verify.test_verdicts import FILE, SEVEN
from verify import EXTRA, compare
from verify.cli import build_parser, main
from verify.errors import UsageError
from verify.implementations import imported
from verify.recorded import ABSENT

ROOT = Path(__file__).parents[2]
CORRECT = ["--quick", "--implementation", "tests.verify.mutants:correct", "--device", "cpu", "--no-isolate"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--backend", "nonsense"], "unknown backend 'nonsense'; choose from "),
        (["--device", "tpu"], "no device 'tpu' here; choose from cpu"),
        (["--implementation", "no_such_module"], "cannot import 'no_such_module'"),
        (["--implementation", "json:nothing"], "module 'json' has no 'nothing'"),
        (["--implementation", "json"], "has none of flash_attn_func"),
        (["--implementation", "torch:sin"], "'torch:sin' is not an attention function"),
        (["--implementation", "tests.verify.mutants:correct", "--backend", "chunked"], "exclude each other"),
        (
            ["--implementation", "tests.verify.seven_kernels:needs_a_mask"],
            "needs the argument 'mask', which flash_attn_func",
        ),
        (["--gradients"], "--gradients goes with --implementation"),
        (
            ["--implementation", "tests.verify.mutants:correct", "--gradients", "--forward-only"],
            "not with --forward-only",
        ),
        (["-k", "no such case"], "no case has 'no such case' in its name"),
        (["--json", "/no/such/folder/file.json"], "there is no folder /no/such/folder"),
        (["--html", "."], "it is a folder"),
        (["--markdown", "x" * 300], "File name too long"),
        (["locate", "verify.planted:right", "--json", "null\0byte"], "embedded null"),
        (["ladder", "--html", "\x1b[2Jmissing/page.html"], r"there is no folder"),
        (["bench", "--json", "/no/such/folder/file.json"], "there is no folder /no/such/folder"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["no-such-command"], "invalid choice"),
        (["bench", "--gpu", "--device", "cpu"], "--gpu means --device cuda, not cpu"),
        (["bench", "--backends", "nonsense"], "unknown backend 'nonsense'; choose from default, "),
        (["bench", "--only", "nonsense"], "no workload 'nonsense'; choose from uniform_varlen, "),
        (["bench", "--against", "no-such-file.json"], "cannot read no-such-file.json"),
        (["bench", "--repeats", "0"], "'0' is not a positive whole number"),
        (["bench", "--tolerance", "-1"], "must be a number of at least 0, got '-1'"),
        (["bench", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["ladder", "--n", "0"], "'0' is not a positive whole number"),
        (["locate", "nonsense"], "unknown backend 'nonsense'; choose from "),
        (["locate", "tests.verify.test_locate:raises"], "raised ZeroDivisionError for q (2, 256, 4, 64)"),
        (["locate", "tests.verify.test_locate:of_another_shape"], "(2, 4, 256, 64), expected shape (2, 256, 4, 64)"),
        (["locate", "tests.verify.test_locate:knows_no_mask", "--causal"], "unexpected keyword argument 'causal'"),
        (["locate", "verify.planted:right", "--heads", "3", "--heads-k", "2"], "must be a multiple of --heads-k"),
        (["locate", "verify.planted:right", "--n", "100000"], "GiB"),
        (["locate"], "required: A"),
        (["report", "a.json", "-o", "/no/such/folder/r.html"], "there is no folder"),
        (["report", "a.json", "-o", "."], "it is a folder"),
    ],
)
def test_a_bad_argument_ends_in_one_line_and_exit_code_2(arguments, part, capsys):
    assert check_refused_in_one_line(main, arguments, part, capsys).strip() == ""


def test_as_a_program_it_ends_in_one_line_and_exit_code_2_too():
    done = forked(
        "import runpy, sys\nsys.argv[1:] = ['--device', 'tpu']\nrunpy.run_module('verify', run_name='__main__')"
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "no device 'tpu' here" in done.stderr and len(done.stderr.splitlines()) == 1


def test_json_holds_every_check_and_where_it_was_obtained(tmp_path):
    saved = tmp_path / "a.json"
    assert main([*CORRECT, "-k", "kv_rotary", "--json", str(saved)]) == 0
    data = json.loads(saved.read_text(encoding="utf-8"))
    assert data["environment"]["torch"].startswith(torch.__version__)
    assert {"device cpu", "date", "python"} <= set(data["environment"])
    against = {(check["quantity"], check["against"]) for check in data["rows"][0]["checks"]}
    assert {
        ("out", "fp64"),
        ("out", "official"),
        ("k_cache", "official"),
        ("v_cache", "official"),
        ("softmax_lse", "official"),
    } <= against


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_fills_up_meanwhile_costs_that_file_alone(tmp_path, capsys):
    page = tmp_path / "a.html"
    assert main([*CORRECT, "-k", "mqa_cross", "--json", "/dev/full", "--html", str(page)]) == 2
    out, err = capsys.readouterr()
    assert err == "python -m verify: cannot write /dev/full: No space left on device\n"
    assert "PASS: 1 of 1 answers right" in out and "PASS: 1 of 1 answers right" in page.read_text(encoding="utf-8")


def test_markdown_and_html_hold_the_same_rows_as_the_terminal(tmp_path, capsys):
    markdown, page = tmp_path / "a.md", tmp_path / "a.html"
    assert main([*CORRECT, "-v", "-k", "varlen_paged", "--markdown", str(markdown), "--html", str(page)]) == 0
    for text in (capsys.readouterr().out, markdown.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")):
        assert (
            "varlen_paged" in text and "tests.verify.mutants:correct" in text and "PASS: 1 of 1 answers right" in text
        )
    assert "http" not in page.read_text(encoding="utf-8") and "allclose" not in page.read_text(encoding="utf-8")


HERE = "tests.verify.test_cli"


def test_a_single_function_stands_for_flash_attn_func_and_the_rest_is_not_supported(tmp_path, capsys):
    code, rows = compare_quickly(f"{HERE}:only_plain_attention", tmp_path, "mqa_cross,window_zero,varlen0")
    verdicts = {case: (row["verdict"], row["note"]) for case, row in rows.items()}
    assert code == 1 and "TOO LITTLE TO SAY: 1 of 1 answers right, 2 declined" in capsys.readouterr().out
    assert verdicts["mqa_cross"][0] == "pass"
    assert verdicts["window_zero"] == ("declined", "got an unexpected keyword argument 'window_size'")
    assert verdicts["varlen0"] == ("declined", "has no flash_attn_varlen_func")


def only_plain_attention(q, k, v):
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).half()


def test_an_implementation_without_softmax_lse_is_judged_by_its_output(tmp_path):
    code, rows = compare_quickly(f"{HERE}:REFUSES_LSE", tmp_path, "mqa_cross")
    row = rows["mqa_cross"]
    assert (code, row["verdict"], row["note"]) == (0, "pass", "without softmax_lse: planted")
    assert {check["quantity"] for check in row["checks"]} == {"out", "dq", "dk", "dv"}


class REFUSES_LSE:
    @staticmethod
    def flash_attn_func(q, k, v, return_attn_probs=False):
        if return_attn_probs:
            raise NotImplementedError("planted")
        return only_plain_attention(q, k, v)


def test_an_implementation_that_serves_nothing_is_a_failure(tmp_path, capsys):
    assert compare_quickly(f"{HERE}:only_plain_attention", tmp_path, "varlen0")[0] == 1
    assert "no case ran" in capsys.readouterr().out


def test_a_backend_asked_only_where_there_is_nothing_to_compute_has_run_no_case(capsys):
    assert main(["--quick", "--backend", "fused", "--device", "cpu", "-k", "no keys,mqa_cross"]) == 1
    assert "fused on cpu: no case ran (runs on CUDA GPUs only)" in capsys.readouterr().out


def raises(q, k, v):
    raise ZeroDivisionError("planted")


def scales_in_place(q, k, v):
    out = only_plain_attention(q, k, v)
    q.mul_(2)
    return out


@pytest.mark.parametrize(
    ("name", "note"), [("raises", "ZeroDivisionError: planted"), ("scales_in_place", "q was written to")]
)
def test_an_exception_or_a_write_into_an_input_is_a_failed_case_that_says_so(name, note, tmp_path):
    code, rows = compare_quickly(f"{HERE}:{name}", tmp_path, "mqa_cross", "--forward-only")
    assert (code, rows["mqa_cross"]["verdict"], rows["mqa_cross"]["note"]) == (1, "FAIL", note)


def test_no_module_of_verify_imports_itself_in_a_circle():
    folder = ROOT / "verify"
    imports = {
        path.stem: {
            name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.level
            for name in ([node.module] if node.module else [alias.name for alias in node.names])
        }
        for path in folder.glob("*.py")
    }
    assert "diagnosis" in imports["locate"]
    graphlib.TopologicalSorter(imports).prepare()


# ---- on a GPU


def ends_its_process(q, k, v, causal=False):
    """A kernel that is right but for one size, at which it ends its process."""
    if q.shape[-1] == 256:
        os.kill(os.getpid(), signal.SIGKILL)
    return attention_ref(q, k, v, causal=causal)[0].to(q.dtype)


def test_rows_of_several_child_processes_come_in_the_order_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "run_in_children", lambda count, steps, asked: steps(0, asked))
    found = []
    for count in (1, 3):
        monkeypatch.setattr(compare, "count_judging_processes", lambda devices, count=count: count)
        saved = tmp_path / f"{count}.json"
        asked = ["-k", "plain 64 d64,func causal gqa", "--backend", "chunked", "--forward-only", "--isolate"]
        main(["--quick", "--device", "cpu", *asked, "--json", str(saved)])
        found.append(json.loads(saved.read_text(encoding="utf-8"))["rows"])
    assert len(found[0]) > 6 and found[0] == found[1]


@pytest.mark.usefixtures("copied_children")
@pytest.mark.parametrize(("on_gpu", "refused"), [(True, []), (True, ["dq ended a process"]), (False, [])])
def test_a_kernel_that_ends_its_process_is_one_wrong_answer_on_a_gpu(on_gpu, refused, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "may_break", lambda device_type: on_gpu)
    monkeypatch.setattr(faults, "list_reasons", lambda: refused)
    saved = tmp_path / "rows.json"
    wanted = ["-k", "head_dim 256,head_dim 264" if on_gpu else "head_dim 264", "--json", str(saved)]
    name = "tests.verify.test_cli:ends_its_process"
    code = main(["--quick", "--device", "cpu", "--forward-only", "--implementation", name, *wanted])
    rows = {row["case"]: row for row in json.loads(saved.read_text(encoding="utf-8"))["rows"]}
    wrong = [row["note"] for row in rows.values() if row["verdict"] == "FAIL"]
    assert wrong == ["its process ended by SIGKILL"] * on_gpu and code == on_gpu
    assert len(rows) == 1 + on_gpu
    told = " ".join(capsys.readouterr().out.split())
    assert ("CUDA_LAUNCH_BLOCKING=1" in told) == on_gpu and ("refused: dq ended" in told) == bool(refused)


def test_a_kernel_that_its_trial_has_rejected_is_wrong_and_not_declined(monkeypatch, capsys, tmp_path):
    launches = fused_on_cpu.record(monkeypatch, tried=True)  # whose kernels compute nothing
    saved = tmp_path / "rows.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = ["--quick", "--device", "cpu", "--forward-only", "--backend", "fused"]
        assert main([*wanted, "-k", "head_dim 52", "--json", str(saved)]) == 1
    (row,) = json.loads(saved.read_text(encoding="utf-8"))["rows"]
    assert launches.seen and row["verdict"] == "FAIL" and "computes wrong numbers on this GPU" in row["note"]


# ---------------------------------------------------------------- verify away from its clone

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The files of an unpacked wheel: the package with verify and without recorded answers."""
    site, left = tmp_path_factory.mktemp("wheel"), shutil.ignore_patterns("__pycache__", "recorded_answers")
    shutil.copytree(Path(REPOSITORY, "flash_attn_compat"), site / "flash_attn_compat", ignore=left)
    shutil.copytree(Path(REPOSITORY, "verify"), site / "flash_attn_compat/verify", ignore=left)
    return site


def in_wheel(site: Path, folder: Path, code: str) -> Answer:
    """Run code in an interpreter of that folder, which finds the wheel and not the clone."""
    path = f"sys.path[:] = [{str(site)!r}, *(p for p in sys.path if p not in ('', {REPOSITORY!r}))]"
    return forked(f"import os, sys\n{path}\nos.chdir({str(folder)!r})\n{code}")


def test_the_command_of_a_wheel_judges_a_kernel_of_the_folder_it_is_called_in(wheel, kernel):
    code = """
from flash_attn_compat.cli import main
codes = [main(["verify", "--implementation", name, "--device", "cpu", "-k", "func causal gqa fp32"])
         for name in ("kernel:right", "kernel.py:right", "kernel.py:wrong")]
codes.append(main(["verify", "locate", "verify.planted:right", "--n", "32", "--heads", "1", "--batch", "1"]))
assert "verify" not in sys.modules
sys.exit(0 if codes == [0, 0, 1, 0] and main(["verify", "--nonsense"]) else 7)
"""
    done = in_wheel(wheel, Path(kernel).parent, code)
    assert done.returncode == 2 and "flash-attn-compat verify: unrecognized arguments" in done.stderr, done.stderr
    assert " ".join(done.stdout.split()).count(ABSENT) == 3


@pytest.mark.thorough
def test_a_wheel_says_the_same_of_the_seven_kernels(wheel, tmp_path) -> None:
    shutil.copy(FILE, tmp_path / "kernels.py")
    code = f"""
from flash_attn_compat import isolation
isolation._START = "fork"
from flash_attn_compat.cli import main
chosen = ["--device", "cpu", "-k", "plain 64 d64,plain 128 d64,func causal sq<sk,func causal gqa fp"]
names = {[*SEVEN, "crashing"]!r}
compared = [main(["verify", "--quick", *chosen, "--isolate" if name == "crashing" else "--no-isolate",
                  "--implementation", f"kernels.py:{{name}}"]) for name in names]
shape = "--n 128 --seqlen-k 170 --batch 1 --heads 1 --head-dim 32 --causal --backward".split()
located = [main(["verify", "locate", f"kernels.py:{{name}}", *shape]) for name in names if name != "plain_squares"]
timed = ["--only", "plain_d64", "--repeats", "1", "--rivals", "none"]
benched = [main(["verify", "bench", "--implementation", f"kernels.py:{{name}}", *timed]) for name in names[:-1]]
print("codes", compared, located, benched)
"""
    done = in_wheel(wheel, tmp_path, code)
    assert done.returncode == 0, done.stderr
    # right, edge, alignment, half precision, squares, gradient, crashing
    assert "codes [0, 1, 1, 1, 1, 1, 1] [0, 1, 1, 1, 1, 0] [0, 1, 1, 1, 1, 1]" in done.stdout, done.stdout[-3000:]
    told = " ".join(done.stdout.split())
    for part in (
        "look closer: flash-attn-compat verify locate kernels.py:wrong_alignment",
        "kernels.py:crashing: the process ended 6 times, first in func plain 128 d64 fp16 on cpu",
        "dk: all of it is 1.05 times the right value",
        "TOO LITTLE TO SAY: 2 of 2 answers right",
    ):
        assert part in told, part


def test_a_file_of_the_current_folder_that_is_named_like_a_library_is_not_run(wheel, tmp_path):
    """Judging a kernel in a folder of downloads runs no other file there."""
    for name in ("torch", "rich", "einops"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the downloaded file ran')")
    code = f"""
before = list(sys.path)
class Watch:
    def find_spec(name, path=None, target=None):
        if name == "flash_attn_compat.verify.cli":  # which imports torch
            assert sys.path == [*before, {str(tmp_path)!r}], sys.path
sys.meta_path.insert(0, Watch)
from flash_attn_compat.cli import main
sys.exit(0 if main(["verify", "--device", "tpu"]) == 2 else 7)
"""
    done = in_wheel(wheel, tmp_path, code)
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
