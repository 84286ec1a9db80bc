"""`flash-attn-compat run`; patch() and unpatch(), which leave all as it was; their switches of PyTorch's attention."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import flash_attn_compat
from flash_attn_compat import cli, settings
from flash_attn_compat.dropin import install, patch, patched, undo, unpatch
from flash_attn_compat.installed import SITE
from tests.dropin.conftest import state
from tests.forms.support import WAITS, Environment, in_threads
from tests.tools.interpreters import WITHOUT_TORCH, Answer, forked, forked_child, fresh

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


IN_A_SCRIPT = ["-x", "--help", "--json", "--api", "9"]


@pytest.mark.parametrize(
    ("arguments", "program_arguments", "version"),
    [
        (["job.py", *IN_A_SCRIPT], IN_A_SCRIPT, "2.8.3"),
        (["-m", "job", "--flag"], ["--flag"], "2.8.3"),
        (["--api", "2.6", "job.py", *IN_A_SCRIPT], IN_A_SCRIPT, "2.6.3"),
        (["--sdpa", "--api=2.6", "job.py"], [], "2.6.3"),
    ],
)
def test_a_program_runs_as_main_with_its_arguments_exit_code_and_interface(
    script, arguments, program_arguments, version
):
    given = [str(script) if word == "job.py" else word for word in arguments]
    answer = run(*given, cwd=script.parent if "-m" in given else "/")
    assert answer.returncode == 7, answer.stderr
    assert json.loads(answer.stdout) == ["__main__", program_arguments, str(script.parent), version]


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


def test_wrong_usage_exits_with_2(capsys):
    for arguments in (["run"], [], ["no-such-command"], ["install", "--no-such-option"]):
        assert stopped(arguments) == 2 and "usage" in capsys.readouterr().err
    assert stopped(["run", "--api", "1.0", "job.py"]) == 2
    assert "--api must be 2.6 or 2.8, got '1.0'" in capsys.readouterr().err


def test_help_describes_each_command_and_the_version_is_told(capsys):
    for command in ([], ["install"], ["uninstall"], ["run"], ["doctor"], ["compile"]):
        assert stopped([*command, "--help"]) == 0
        usage, says, *_ = capsys.readouterr().out.split("\n\n")
        assert usage.startswith("usage: flash-attn-compat") and says.endswith(".") and "  " not in says
    assert stopped(["--version"]) == 0
    assert capsys.readouterr().out == f"flash-attn-compat {flash_attn_compat.__version__}\n"


def test_the_uninstall_command_is_shown_with_its_directory(tmp_path, capsys):
    folder = tmp_path / "my packages"
    folder.mkdir()
    assert cli.main(["install", "--target", str(folder)]) == 0
    told = capsys.readouterr().out.partition("; ")[2].removesuffix(" removes it\n")
    assert cli.main(shlex.split(told)[1:]) == 0 and not list(folder.iterdir())


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


@pytest.mark.parametrize(
    ("missing", "commands"),
    [("torch", [["doctor"], ["tune"], ["compile", "--for", "sm_75"]]), ("einops", [["doctor"]])],
)
def test_without_what_it_needs_a_command_ends_in_one_line(missing, commands):
    code = f"import sys; sys.modules[{missing!r}] = None; from flash_attn_compat import cli\n"
    code += f"for command in {commands}: print(cli.main(command))"
    answer = fresh("-c", code) if missing == "torch" else forked(code)
    assert answer.stdout.split() == ["2"] * len(commands)
    line = f"flash-attn-compat: {missing} is not installed: pip install {missing}\n"
    assert answer.stderr == line * len(commands)


# ----------------------------------------------- patch() and unpatch(), however often and from wherever they are called


def use_the_name() -> None:
    for name in ("flash_attn", "flash_attn.layers.rotary", "flash_attn_2_cuda"):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("pythonpath", "options"),
    [(None, {}), ("", {"api": "2.6"}), ("/somewhere", {"interfaces": ("fa3", "fa4")}), (f"/somewhere{os.pathsep}", {})],
)
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
        for _ in range(4):
            with patched():
                use_the_name()

    in_threads(work, 6)
    assert state() == before


# ---------------------- patch(sdpa=True) and patch(flex=True) switch PyTorch's attention on; nothing else does


class Switch:
    """One of the two: its name, its variable, and what a process prints of the wish in force."""

    def __init__(self, name: str) -> None:
        self.name, self.variable = name, f"FLASH_ATTN_COMPAT_{name.upper()}"
        self.home = f"flash_attn_compat.torch_{name}.override"
        before = "import torch, sys" if name == "sdpa" else "import torch.nn.attention.flex_attention, sys"
        self.look = f"{before}; m = sys.modules.get({self.home!r}); w = m and m.active_policy(); print(w and w.always)"

    def on(self, wanted: Any) -> dict[str, Any]:
        return {self.name: wanted}

    def wish(self) -> bool | None:
        """None: off; False: on; True: always."""
        found = importlib.import_module(self.home).active_policy()
        return None if found is None else found.always


@pytest.fixture(params=["sdpa", "flex"])
def switch(request: pytest.FixtureRequest) -> Iterator[Switch]:
    if request.param == "sdpa" and "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        pytest.skip("before PyTorch 2.5 the operators stay PyTorch's")
    if request.param == "flex" and TorchVersion(torch.__version__) < "2.6":
        pytest.skip("flex needs PyTorch 2.6")
    if request.param == "flex":
        importlib.import_module("torch.nn.attention.flex_attention")  # which patch() waits for
    made = Switch(request.param)
    yield made
    unpatch()
    assert made.wish() is None


@pytest.mark.parametrize("wanted", [True, 1])
def test_patch_switches_it_on_only_if_asked_and_unpatch_off(switch: Switch, wanted: Any) -> None:
    patch()
    assert switch.wish() is None and switch.variable not in os.environ
    patch(**switch.on(wanted))
    assert switch.wish() is False and os.environ[switch.variable] == "1"
    unpatch()
    assert switch.wish() is None and switch.variable not in os.environ


def test_a_second_patch_may_ask_for_more_and_never_for_less(switch: Switch) -> None:
    for wanted in (True, True, "always", True):
        patch(**switch.on(wanted))
    assert switch.wish() is True and os.environ[switch.variable] == "always"


def test_a_block_ends_its_own_wish_alone(switch: Switch) -> None:
    with patched(**switch.on("always")):
        assert switch.wish() is True
    assert switch.wish() is None
    patch(**switch.on(True))
    with getattr(flash_attn_compat, switch.name)(always=True):
        assert switch.wish() is True
    assert switch.wish() is False


def test_the_variable_speaks_for_patch(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("1", False), ("always", True), ("0", None), ("", None)):
        monkeypatch.setenv(switch.variable, value)
        with patched():
            assert switch.wish() is wanted


def test_an_unknown_setting_is_refused(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f'{switch.name} must be False, True or "always"'):
        patch(**switch.on("sometimes"))
    monkeypatch.setenv(switch.variable, "on")
    with pytest.raises(ValueError, match=f"{switch.variable} must be 0, 1 or always, got 'on'"):
        patch()


def test_the_variable_alone_loads_nothing_of_it(switch: Switch) -> None:
    answer = forked("import flash_attn_compat\n" + switch.look, **{switch.variable: "1"})
    assert answer.stdout.strip() == "None", answer.stderr


def test_children_of_a_patched_process_wait_for_torch_too(switch: Switch) -> None:
    patch(**switch.on("always"))
    answer = forked_child(f"{WITHOUT_TORCH}\nassert 'torch' not in sys.modules\n{switch.look}")
    assert answer.stdout.strip() == "True", answer.stderr


def test_patch_waits_for_torch() -> None:
    answer = forked(f"""
{WITHOUT_TORCH}
import flash_attn_compat
flash_attn_compat.patch(sdpa="always")
assert "torch" not in sys.modules
{Switch("sdpa").look}
flash_attn_compat.unpatch()
print(m.active_policy())
""")
    assert answer.stdout.split() == ["True", "None"], answer.stderr


def test_run_takes_it_before_the_script(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"import sys\nprint(sys.argv[1:])\n{WAITS}")
    for option, wanted in ((["--sdpa=always"], "True"), ([], "False")):
        arguments = ["run", *option, str(script), "--sdpa"]
        answer = forked(f"from flash_attn_compat import cli; cli.main({arguments!r})")
        assert answer.stdout.splitlines() == ["['--sdpa']", wanted], answer.stderr
    arguments = ["run", "--flex=always", "script.py", "--flex"]
    assert cli._parse_run_options(arguments)[-1] == "always" and arguments == ["run", "script.py", "--flex"]


def test_install_writes_it_for_every_process_and_the_variable_overrules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment(tmp_path / "env")
    assert environment.command("install", "--sdpa").returncode == 0
    answer = environment.forked(Switch("sdpa").look)
    assert answer.stdout.strip() == "False", answer.stderr
    for value, wanted in (("1", "True"), ("0", "False")):
        monkeypatch.setenv(settings.SDPA, value)
        assert environment.call("-c", WAITS).stdout.strip() == wanted


def test_the_line_that_install_writes(tmp_path: Path) -> None:
    for options, wanted in (
        ({}, ""), ({"sdpa": "1"}, "'1'"), ({"sdpa": "always"}, "'always'"),
        ({"sdpa": "1", "flex": "always"}, "'1', flex='always'"),
    ):  # fmt: skip
        install.install(tmp_path, **options)
        line = (tmp_path / "_flash_attn_compat_startup.pth").read_text()
        assert line.endswith(f".wait_for_imports({wanted})\n")


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.6", reason="flex needs PyTorch 2.6")
@pytest.mark.parametrize("flex", [None, "1"])
def test_an_installation_of_flex_switches_it_on_at_the_import_and_doctor_says_so(
    flex: str | None, tmp_path: Path
) -> None:
    environment = Environment(tmp_path)
    install.install(environment.site_packages, flex=flex)
    told = "from flash_attn_compat import doctor; print(doctor._explain_flex(torch.device('cpu')))"
    answer = environment.forked(f"{Switch('flex').look}\n{told}")
    on, said = answer.stdout.splitlines()
    assert on == ("False" if flex else "None"), answer.stderr
    assert f"'switched on': '{'yes' if flex else 'no ('}" in said
