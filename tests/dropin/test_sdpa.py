"""patch(sdpa=True), its variable, run --sdpa and install --sdpa switch PyTorch's operators on; nothing else does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import settings
from flash_attn_compat.dropin import install, patch, patched, unpatch
from flash_attn_compat.torch_sdpa import override
from tests.dropin.environment import Environment
from tests.tools.interpreters import WITHOUT_TORCH, forked, forked_child

# What holds in a process: prints the wish in force, if this package was loaded at all.
LOOK = (
    "import torch, sys; m = sys.modules.get('flash_attn_compat.torch_sdpa.override'); w = m and m.active_policy(); "
    "print(w and w.always)"
)


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    if "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        pytest.skip("before PyTorch 2.5 the operators stay PyTorch's")
    yield
    unpatch()
    assert override.active_policy() is None


def wish() -> bool | None:
    """None: off; False: on; True: always."""
    found = override.active_policy()
    return None if found is None else found.always


def test_patch_alone_switches_nothing_on() -> None:
    patch()
    assert wish() is None and settings.SDPA not in os.environ


@pytest.mark.parametrize("wanted", [True, 1])
def test_patch_switches_it_on_and_unpatch_off(wanted: bool) -> None:
    patch(sdpa=wanted)
    assert wish() is False and os.environ[settings.SDPA] == "1"
    unpatch()
    assert wish() is None and settings.SDPA not in os.environ


def test_a_second_patch_may_ask_for_more_and_never_for_less() -> None:
    patch()
    patch(sdpa=True)
    patch(sdpa=True)
    patch(sdpa="always")
    assert wish() is True and os.environ[settings.SDPA] == "always"
    patch(sdpa=True)
    assert wish() is True and os.environ[settings.SDPA] == "always"


def test_a_block_of_patched_ends_it() -> None:
    with patched(sdpa="always"):
        assert wish() is True
    assert wish() is None


def test_a_block_within_a_patch_leaves_it_on() -> None:
    patch(sdpa=True)
    with flash_attn_compat.sdpa(always=True):
        assert wish() is True
    assert wish() is False


@pytest.mark.parametrize(("value", "wanted"), [("1", False), ("always", True), ("0", None), ("", None)])
def test_the_variable_speaks_for_patch(value: str, wanted: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SDPA, value)
    patch()
    assert wish() is wanted


def test_an_unknown_sdpa_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match='sdpa must be False, True or "always"'):
        patch(sdpa="sometimes")  # type: ignore[arg-type]
    monkeypatch.setenv(settings.SDPA, "on")
    with pytest.raises(ValueError, match="FLASH_ATTN_COMPAT_SDPA must be 0, 1 or always, got 'on'"):
        patch()


def test_the_variable_alone_loads_nothing_of_it() -> None:
    answer = forked("import flash_attn_compat\n" + LOOK, FLASH_ATTN_COMPAT_SDPA="1")
    assert answer.stdout.strip() == "None", answer.stderr


def test_patch_waits_for_torch() -> None:
    code = f"""
{WITHOUT_TORCH}
import flash_attn_compat
flash_attn_compat.patch(sdpa="always")
assert "torch" not in sys.modules
{LOOK}
flash_attn_compat.unpatch()
print(m.active_policy())
"""
    answer = forked(code)
    assert answer.stdout.split() == ["True", "None"], answer.stderr


def test_children_of_a_patched_process_wait_for_torch_too() -> None:
    patch(sdpa="always")
    answer = forked_child(f"{WITHOUT_TORCH}\nassert 'torch' not in sys.modules\n{LOOK}")
    assert answer.stdout.strip() == "True", answer.stderr


def test_run_takes_it_before_the_script(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    waits = "import _flash_attn_compat_startup as startup; print('torch' in startup._awaited)"
    script.write_text(f"import sys\nprint(sys.argv[1:])\n{waits}")
    for option, wanted in ((["--sdpa=always"], "True"), ([], "False")):
        arguments = ["run", *option, str(script), "--sdpa"]
        answer = forked(f"from flash_attn_compat import cli; cli.main({arguments!r})")
        assert answer.stdout.splitlines() == ["['--sdpa']", wanted], answer.stderr


def test_install_writes_it_for_every_process_and_the_variable_overrules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment(tmp_path / "env")
    assert environment.command("install", "--sdpa").returncode == 0
    answer = environment.forked(LOOK)
    assert answer.stdout.strip() == "False", answer.stderr
    waits = "import _flash_attn_compat_startup as startup; print('torch' in startup._awaited)"
    for value, wanted in (("1", "True"), ("0", "False")):
        monkeypatch.setenv(settings.SDPA, value)
        assert environment.call("-c", waits).stdout.strip() == wanted


def test_the_line_that_install_writes(tmp_path: Path) -> None:
    for sdpa, wanted in ((None, ""), ("1", "'1'"), ("always", "'always'")):
        install.install(tmp_path, sdpa=sdpa)
        line = (tmp_path / "_flash_attn_compat_startup.pth").read_text()
        assert line.endswith(f".wait_for_imports({wanted})\n")
