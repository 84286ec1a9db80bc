"""patch(flex=True), its variable, run --flex and install --flex put our kernels under flex_attention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import cli, settings
from flash_attn_compat.dropin import install, patch, patched, unpatch
from tests.dropin.environment import Environment
from tests.tools.interpreters import forked, forked_child

pytest.importorskip("torch.nn.attention.flex_attention", reason="PyTorch 2.5 brought it")
if torch.__version__ < torch.torch_version.TorchVersion("2.6"):
    pytest.skip("flex needs PyTorch 2.6", allow_module_level=True)

from flash_attn_compat.torch_flex import override

LOOK = (
    "import torch.nn.attention.flex_attention, sys; m = sys.modules.get('flash_attn_compat.torch_flex.override'); "
    "w = m and m.active_policy(); print(w and w.always)"
)


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    unpatch()
    assert override.active_policy() is None


def wish() -> bool | None:
    """None: off; False: on; True: always."""
    found = override.active_policy()
    return None if found is None else found.always


def test_patch_alone_switches_nothing_on() -> None:
    patch()
    assert wish() is None and settings.FLEX not in os.environ


def test_patch_switches_it_on_and_unpatch_off() -> None:
    patch(flex=True)
    assert wish() is False and os.environ[settings.FLEX] == "1"
    patch(flex="always")
    assert wish() is True
    unpatch()
    assert wish() is None and settings.FLEX not in os.environ


def test_blocks_end_it() -> None:
    with patched(flex="always"):
        assert wish() is True
    with flash_attn_compat.flex():
        assert wish() is False
    assert wish() is None


@pytest.mark.parametrize(("value", "wanted"), [("1", False), ("always", True), ("0", None), ("", None)])
def test_the_variable_speaks_for_patch(value: str, wanted: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.FLEX, value)
    patch()
    assert wish() is wanted


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(ValueError, match='flex must be False, True or "always"'):
        patch(flex="sometimes")  # type: ignore[arg-type]


def test_children_of_a_patched_process_switch_it_on_at_the_import() -> None:
    patch(flex="always")
    answer = forked_child(LOOK)
    assert answer.stdout.strip() == "True", answer.stderr


def test_the_variable_alone_switches_nothing_on() -> None:
    answer = forked("import flash_attn_compat\n" + LOOK, FLASH_ATTN_COMPAT_FLEX="1")
    assert answer.stdout.strip() == "None", answer.stderr


def test_run_takes_it_before_the_script() -> None:
    arguments = ["run", "--flex=always", "script.py", "--flex"]
    assert cli._parse_run_options(arguments)[-1] == "always" and arguments == ["run", "script.py", "--flex"]


def test_the_line_that_install_writes(tmp_path: Path) -> None:
    install.install(tmp_path, sdpa="1", flex="always")
    line = (tmp_path / "_flash_attn_compat_startup.pth").read_text()
    assert line.endswith(".wait_for_imports('1', flex='always')\n")


@pytest.mark.parametrize("flex", [None, "1"])
def test_an_installation_switches_it_on_at_the_import_and_doctor_says_so(flex: str | None, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    install.install(environment.site_packages, flex=flex)
    answer = environment.forked(
        f"{LOOK}\nfrom flash_attn_compat import doctor\nprint(doctor._explain_flex(torch.device('cpu')))"
    )
    on, told = answer.stdout.splitlines()
    assert on == ("False" if flex else "None"), answer.stderr
    assert f"'switched on': '{'yes' if flex else 'no ('}" in told
