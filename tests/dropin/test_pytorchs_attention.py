"""patch(sdpa=True), patch(flex=True), their variables and commands switch PyTorch's attention on; nothing else does."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import flash_attn_compat
from flash_attn_compat import cli, settings
from flash_attn_compat.dropin import install, patch, patched, unpatch
from tests.dropin.environment import Environment
from tests.tools.interpreters import WITHOUT_TORCH, forked, forked_child

WAITS = "import _flash_attn_compat_startup as startup; print('torch' in startup._awaited)"


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


def test_patch_alone_switches_nothing_on(switch: Switch) -> None:
    patch()
    assert switch.wish() is None and switch.variable not in os.environ


@pytest.mark.parametrize("wanted", [True, 1])
def test_patch_switches_it_on_and_unpatch_off(switch: Switch, wanted: Any) -> None:
    patch(**switch.on(wanted))
    assert switch.wish() is False and os.environ[switch.variable] == "1"
    unpatch()
    assert switch.wish() is None and switch.variable not in os.environ


def test_a_second_patch_may_ask_for_more_and_never_for_less(switch: Switch) -> None:
    patch()
    for wanted in (True, True, "always"):
        patch(**switch.on(wanted))
    assert switch.wish() is True and os.environ[switch.variable] == "always"
    patch(**switch.on(True))
    assert switch.wish() is True and os.environ[switch.variable] == "always"


def test_a_block_of_patched_ends_it(switch: Switch) -> None:
    with patched(**switch.on("always")):
        assert switch.wish() is True
    assert switch.wish() is None


def test_a_block_within_a_patch_leaves_it_on(switch: Switch) -> None:
    patch(**switch.on(True))
    with getattr(flash_attn_compat, switch.name)(always=True):
        assert switch.wish() is True
    assert switch.wish() is False


@pytest.mark.parametrize(("value", "wanted"), [("1", False), ("always", True), ("0", None), ("", None)])
def test_the_variable_speaks_for_patch(
    switch: Switch, value: str, wanted: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.variable, value)
    patch()
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
    code = f"""
{WITHOUT_TORCH}
import flash_attn_compat
flash_attn_compat.patch(sdpa="always")
assert "torch" not in sys.modules
{Switch("sdpa").look}
flash_attn_compat.unpatch()
print(m.active_policy())
"""
    answer = forked(code)
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
