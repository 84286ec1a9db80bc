"""flash-attn-compat run behaves as the interpreter it starts; wrong usage is told."""

from __future__ import annotations

import json

import pytest

import flash_attn_compat
from flash_attn_compat import cli

SCRIPT = """
import json, sys
import flash_attn

def fail():
    raise KeyError("a message")

print(json.dumps([__name__, sys.argv[1:], sys.path[0], flash_attn.__version__]))
if sys.argv[-1] == "fail":
    fail()
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def command(python):
    return lambda *arguments, **options: python("-m", "flash_attn_compat", *arguments, **options)


def test_a_script_runs_as_main_with_its_arguments_and_its_exit_code(command, script, tmp_path):
    answer = command("run", str(script), "-x", "--help", "--json", cwd="/")
    assert answer.returncode == 7, answer.stderr
    assert json.loads(answer.stdout) == ["__main__", ["-x", "--help", "--json"], str(tmp_path), "2.8.3"]


def test_a_module_runs_as_main_from_the_current_directory(command, script, tmp_path):
    answer = command("run", "-m", "job", "--flag", cwd=tmp_path)
    assert answer.returncode == 7, answer.stderr
    assert json.loads(answer.stdout) == ["__main__", ["--flag"], str(tmp_path), "2.8.3"]


def test_a_traceback_is_that_of_a_direct_run(command, python, script, tmp_path):
    (tmp_path / "flash_attn.py").write_text("__version__ = '2.8.3'\n")
    direct = python(str(script), "fail")
    (tmp_path / "flash_attn.py").unlink()
    under = command("run", str(script), "fail")
    assert under.returncode == direct.returncode == 1
    assert under.stderr == direct.stderr and "KeyError: 'a message'" in under.stderr


def test_a_missing_script_fails_as_the_interpreter_does(command, python):
    under, direct = command("run", "/not/there.py"), python("/not/there.py")
    assert (under.returncode, under.stderr) == (direct.returncode, direct.stderr)


def test_children_of_the_script_are_served(command, tmp_path):
    path = tmp_path / "parent.py"
    path.write_text("import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import flash_attn']))")
    assert command("run", str(path)).returncode == 0


@pytest.mark.parametrize("arguments", [["run"], [], ["no-such-command"], ["install", "--no-such-option"]])
def test_wrong_usage_exits_with_2(command, arguments):
    answer = command(*arguments)
    assert answer.returncode == 2 and "usage" in answer.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["doctor", "-h"]])
def test_help_is_printed_and_exits_with_0(command, arguments):
    answer = command(*arguments)
    assert answer.returncode == 0 and "usage: flash-attn-compat" in answer.stdout


def test_the_version_is_told(command):
    answer = command("--version")
    assert (answer.returncode, answer.stdout) == (0, f"flash-attn-compat {flash_attn_compat.__version__}\n")


@pytest.mark.parametrize("name", ["install", "uninstall", "run", "doctor", "compile"])
def test_each_command_says_in_its_help_what_it_does(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    paragraphs = capsys.readouterr().out.split("\n\n")
    assert paragraphs[1].endswith(".") and "  " not in paragraphs[1]


@pytest.mark.parametrize("arguments", [["run", "-m", "this"], ["doctor"]], ids=lambda arguments: arguments[0])
def test_a_variable_that_means_nothing_ends_in_one_line(arguments, monkeypatch, capsys):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "on")
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err
    assert told == "flash-attn-compat: FLASH_ATTN_COMPAT_FUSED must be 0 or 1, got 'on'\n"
