"""`flash-attn-compat run`, children of a patched process, and patch() and unpatch(), which leave all as it was."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import types
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

import flash_attn_compat
from flash_attn_compat import cli
from flash_attn_compat.dropin import patch, patched, undo, unpatch
from flash_attn_compat.installed import SITE
from tests.dropin.conftest import state
from tests.dropin.environment import write_package
from tests.forms.support import in_threads
from tests.sdpa import originals
from tests.tools.interpreters import Answer, forked, forked_child, fresh

SCRIPT = """
import importlib.metadata, json, sys

def fail():
    raise KeyError("a message")

if sys.argv[-1] == "fail":
    fail()
print(json.dumps([__name__, sys.argv[1:], sys.path[0], importlib.metadata.version("flash-attn")]))
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def run(*arguments, **options) -> Answer:
    return fresh("-m", "flash_attn_compat", "run", *arguments, **options)


def test_a_script_runs_as_main_with_its_arguments_and_its_exit_code(script, tmp_path):
    answer = run(str(script), "-x", "--help", "--json", cwd="/")
    assert answer.returncode == 7, answer.stderr
    assert json.loads(answer.stdout) == ["__main__", ["-x", "--help", "--json"], str(tmp_path), "2.8.3"]


def test_a_module_runs_as_main_from_the_current_directory(script, tmp_path):
    answer = run("-m", "job", "--flag", cwd=tmp_path)
    assert answer.returncode == 7, answer.stderr
    assert json.loads(answer.stdout) == ["__main__", ["--flag"], str(tmp_path), "2.8.3"]


def test_a_failing_program_fails_as_in_a_direct_run(script):
    for arguments in ((str(script), "fail"), ("/not/there.py",)):
        under, direct = run(*arguments), fresh(*arguments)
        assert under.returncode == direct.returncode > 0 and under.stderr == direct.stderr != ""


def test_children_of_the_script_are_served(tmp_path):
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('flash_attn') is None)"
    path = tmp_path / "parent.py"
    path.write_text(f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {look!r}]))")
    assert run(str(path)).returncode == 0 != fresh(str(path)).returncode


def stopped(arguments: list[str]) -> int | str | None:
    """The exit code of a command line that does nothing."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    return stop.value.code


@pytest.mark.parametrize("arguments", [["run"], [], ["no-such-command"], ["install", "--no-such-option"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    assert stopped(arguments) == 2 and "usage" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["install"], ["uninstall"], ["run"], ["doctor"], ["compile"]])
def test_help_describes_each_command(command, capsys):
    assert stopped([*command, "--help"]) == 0
    usage, says, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith("usage: flash-attn-compat") and says.endswith(".") and "  " not in says


def test_the_uninstall_command_is_shown_with_its_directory(tmp_path, capsys):
    folder = tmp_path / "my packages"
    folder.mkdir()
    assert cli.main(["install", "--target", str(folder)]) == 0
    told = capsys.readouterr().out.partition("; ")[2].removesuffix(" removes it\n")
    assert cli.main(shlex.split(told)[1:]) == 0 and not list(folder.iterdir())


def test_the_version_is_told(capsys):
    assert stopped(["--version"]) == 0
    assert capsys.readouterr().out == f"flash-attn-compat {flash_attn_compat.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "variable", "value", "wanted"),
    [
        (["run", "-m", "this"], "FUSED", "on", "0 or 1, got 'on'"),
        (["doctor"], "FUSED", "on", "0 or 1, got 'on'"),
        (["doctor"], "BACKEND", "sdpaa", "one of "),
    ],
)
def test_a_variable_that_means_nothing_ends_in_one_line(arguments, variable, value, wanted, monkeypatch, capsys):
    monkeypatch.setenv(f"FLASH_ATTN_COMPAT_{variable}", value)
    assert cli.main(arguments) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"flash-attn-compat: FLASH_ATTN_COMPAT_{variable} must be {wanted}")


@pytest.mark.parametrize("options", [["--api", "2.6"], ["--api=2.6"], ["--sdpa", "--api", "2.6"]])
def test_run_takes_the_interface_that_the_script_wants(script, tmp_path, options):
    answer = run(*options, str(script), "--api", "9", cwd="/")
    assert answer.returncode == 7, answer.stderr
    assert json.loads(answer.stdout) == ["__main__", ["--api", "9"], str(tmp_path), "2.6.3"]


def test_an_unknown_interface_ends_in_one_line(capsys):
    assert stopped(["run", "--api", "1.0", "job.py"]) == 2
    assert "--api must be 2.6 or 2.8, got '1.0'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["doctor"], ["tune"], ["compile", "--for", "sm_75"]])
def test_without_torch_a_command_that_needs_it_ends_in_one_line(command):
    code = f"import sys; sys.modules['torch'] = None; from flash_attn_compat import cli; sys.exit(cli.main({command}))"
    answer = fresh("-c", code)
    assert (answer.returncode, answer.stderr) == (2, "flash-attn-compat: torch is not installed: pip install torch\n")


def test_without_einops_the_doctor_ends_in_one_line():
    code = "import sys; sys.modules['einops'] = None; from flash_attn_compat import cli; sys.exit(cli.main(['doctor']))"
    answer = forked(code)
    assert (answer.returncode, answer.stderr) == (2, "flash-attn-compat: einops is not installed: pip install einops\n")


# ---------------------------------------------------------------- child processes, with any other entries on their path

WAITS = "import sys; import _flash_attn_compat_startup as startup; print('torch' in startup._awaited)\n"
BROKEN = "raise ImportError('undefined symbol')\n"


def child(*arguments: str, cwd: Path | str = "/") -> Answer:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the user's on PYTHONPATH, before patch() puts ours there."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def test_a_sitecustomize_of_the_user_runs_beside_ours(theirs: Path) -> None:
    (theirs / "sitecustomize.py").write_text("import builtins; builtins.theirs_ran = True")
    patch(sdpa=True)
    answer = child("-c", WAITS + "import builtins; print(builtins.theirs_ran)")
    assert answer.stdout.split() == ["True", "True"], answer.stderr


@pytest.mark.parametrize("there", [BROKEN, None], ids=["broken", "half"])
def test_a_broken_flash_attn_on_pythonpath_does_not_win(theirs: Path, there: str | None) -> None:
    write_package(theirs, there, flash_attn_interface=BROKEN)
    patch()
    answer = forked_child("import flash_attn; print(flash_attn.__version__, flash_attn.flash_attn_func.__module__)")
    assert answer.stdout.split() == ["2.8.3", "flash_attn.flash_attn_interface"], answer.stderr


LOOK = "import importlib.util as u; print(u.find_spec('flash_attn').origin, u.find_spec('flash_attn').origin)"


def test_a_folder_beside_the_script_is_hidden_with_one_warning(tmp_path: Path) -> None:
    write_package(tmp_path, BROKEN)
    (tmp_path / "job.py").write_text(LOOK)
    patch()
    answer = child(str(tmp_path / "job.py"))
    assert answer.stdout.count("flash_attn_compat") == 2, answer.stderr
    assert answer.stderr.count("is not used") == 1 and str(tmp_path) in answer.stderr


def test_a_folder_without_init_beside_the_script_is_not_worth_a_warning(tmp_path: Path) -> None:
    write_package(tmp_path, None, cute="")
    (tmp_path / "job.py").write_text(LOOK)
    patch()
    answer = child(str(tmp_path / "job.py"))
    assert answer.stdout.count("flash_attn_compat") == 2 and not answer.stderr


@originals.needs_grouped_heads
def test_a_child_whose_sitecustomize_is_not_ours_catches_up_when_it_imports_flash_attn(theirs: Path) -> None:
    patch(sdpa=True)
    (theirs / "sitecustomize.py").write_text("")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(theirs), os.environ["PYTHONPATH"]])  # whoever starts the child
    look = (
        "import sys; from flash_attn_compat.torch_sdpa import override; assert override.active_policy() is None;"
        "import flash_attn; print(override.active_policy())"
    )
    answer = forked_child(look)
    assert answer.stdout.startswith("Policy("), answer.stderr
    os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]


def test_children_beside_a_working_flash_attn_keep_it_and_get_the_requested_patches(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_attn_compat.dropin import installed_package

    package = write_package(theirs, "__version__ = '2.8.0'\n")
    monkeypatch.syspath_prepend(str(theirs))
    monkeypatch.setattr(installed_package, "_find_fault", lambda spec, undo: None)
    patch(sdpa="always")
    answer = child("-c", WAITS + "import flash_attn; print(flash_attn.__file__)")
    assert answer.stdout.split() == ["True", str(package / "__init__.py")], answer.stderr


# ----------------------------------------------- patch() and unpatch(), however often and from wherever they are called


def use_the_name() -> None:
    for name in ("flash_attn", "flash_attn.layers.rotary", "flash_attn_2_cuda"):
        importlib.import_module(name)


@pytest.mark.parametrize("pythonpath", [None, "", "/somewhere", f"/somewhere{os.pathsep}"])
@pytest.mark.parametrize("options", [{}, {"api": "2.6"}, {"interfaces": ("fa3", "fa4")}], ids=str)
def test_unpatch_restores_paths_finders_environment_and_modules_and_patch_can_follow(monkeypatch, pythonpath, options):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if pythonpath is not None:
        monkeypatch.setenv("PYTHONPATH", pythonpath)
    before = state()
    patch(**options)
    once = state()
    assert all(one != other for one, other in zip(once[:3], before))
    theirs = pythonpath.split(os.pathsep) if pythonpath else []  # "" among them is the current directory
    entries = os.environ["PYTHONPATH"].split(os.pathsep)
    assert entries[len(entries) - len(theirs) :] == theirs  # behind ours
    patch()
    assert state() == once
    use_the_name()
    for _ in range(2):
        unpatch()
        assert state() == before
    patch()
    use_the_name()
    unpatch()
    assert state() == before


def test_nested_blocks_undo_at_the_outermost_end_and_when_they_raise():
    before = state()
    with pytest.raises(KeyError), patched():
        with patched():
            use_the_name()
        importlib.import_module("flash_attn")
        raise KeyError
    assert state() == before
    patch()
    with patched():
        pass
    importlib.import_module("flash_attn")  # a block leaves an explicit patch standing


def test_unpatch_keeps_path_entries_of_others(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a")
    monkeypatch.setattr(sys, "path", list(sys.path))
    patch()
    os.environ["PYTHONPATH"] += os.pathsep + "/b"
    sys.path.append("/others")
    unpatch()
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["/a", "/b"])
    assert sys.path[-1] == "/others" and SITE not in sys.path


@pytest.mark.parametrize("left", [None, types.ModuleType("flash_attn")], ids=["none", "a bare stub"])
def test_modules_of_others_are_replaced_and_restored(monkeypatch, left):
    monkeypatch.setitem(sys.modules, "flash_attn", left)
    patch()
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    unpatch()
    assert "flash_attn" in sys.modules and sys.modules["flash_attn"] is left


def test_all_who_wait_for_a_module_get_it_and_closing_takes_back_what_they_did(tmp_path, monkeypatch):
    (tmp_path / "awaited.py").write_text("told = ''\n")
    monkeypatch.syspath_prepend(tmp_path)

    def tell(module: types.ModuleType, stack: ExitStack, word: str) -> None:
        undo.set_attribute(module, "told", module.told + word, stack)

    with ExitStack() as stack:
        for word in ("first", "second"):
            undo.when_imported({"awaited": partial(tell, word=word)}, stack)
        moved = stack.pop_all()  # as patch() keeps it
    awaited = importlib.import_module("awaited")
    assert awaited.told == "firstsecond"
    moved.close()
    assert awaited.told == ""
    del sys.modules["awaited"]


def test_threads_that_patch_and_unpatch_at_once_leave_nothing():
    before = state()

    def work() -> None:
        for _ in range(10):
            with patched():
                use_the_name()

    in_threads(work, 8)
    assert state() == before
