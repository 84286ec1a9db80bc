"""Child processes of a patched process are patched too, with any other entries on their path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flash_attn_compat.dropin import patch
from tests.dropin.environment import write_package
from tests.sdpa import originals
from tests.tools.interpreters import Answer, forked_child

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
