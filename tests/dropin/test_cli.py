"""flash-attn-compat run behaves as the interpreter it starts; wrong usage is told."""

from __future__ import annotations

import json
import shlex

import pytest

import flash_attn_compat
from flash_attn_compat import cli
from tests.tools.interpreters import Answer, forked, fresh

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
