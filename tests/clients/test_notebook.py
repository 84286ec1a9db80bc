"""examples/t4.ipynb: its cells run from top to bottom, and say to other programs what these take."""

from __future__ import annotations

import ast
import json
import math
import sys
import zipfile
from typing import Any

import pytest

import flash_attn_compat
from flash_attn_compat import cli
from tests import notebook

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")


def commands() -> list[list[str]]:
    """What any cell gives to flash-attn-compat, where there is a GPU too."""
    calls = (node for source in notebook.cells().values() for node in ast.walk(ast.parse(source)))
    shells = (ast.unparse(call).partition("'flash_attn_compat', ") for call in calls if is_shell(call))
    return [list(ast.literal_eval(f"[{words.rstrip(')')}]")) for _, found, words in shells if found]


def is_shell(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "shell"


def test_commands_of_all_cells_exist() -> None:
    assert {words[0] for words in commands()} >= {"doctor", "tune"}
    for words in commands():
        cli._parser().parse_args(words)


def test_the_notebook_is_kept_without_outputs() -> None:
    found = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in found)


def test_a_command_that_fails_stops_the_notebook_after_what_it_said(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    notebook.run("install", next(iter(notebook.cells().values())), names)
    with pytest.raises(RuntimeError, match="exit code 3"):
        names["shell"](sys.executable, "-S", "-c", "print('said'); raise SystemExit(3)")
    assert capsys.readouterr().out == "said\n"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that its cells leave behind, and what they told other programs to do as `told`."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook.save_tiny_model(folder / "tiny")
    names: dict[str, Any] = {"folder": folder, "told": []}

    def shell(*command: str) -> str:
        names["told"].append(command)
        return "said\n"

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NOTEBOOK_MODEL", str(folder / "tiny"))
        try:
            for name, source in notebook.cells().items():
                notebook.run(name, source, names)
                names["shell"] = shell
        finally:
            flash_attn_compat.unpatch()
    return names


def test_cells_run_from_top_to_bottom_and_install_nothing_that_is_there(ran: dict[str, Any]) -> None:
    assert ran["missing"] == []
    assert [command[:4] for command in ran["told"]] == [(sys.executable, "-m", "flash_attn_compat", "doctor")]


def test_its_lora_computes_attention_by_this_package_and_learns_what_sdpa_learns(ran: dict[str, Any]) -> None:
    ours, theirs = (ran["figures"][f"LoRA, {name}"]["losses"] for name in ("flash_attention_2", "SDPA"))
    assert sum(ran["served"].values()) == len(ours) * 2, "a forward of two layers for each step"
    assert ours[-1] < ours[0] and all(math.isclose(a, b, rel_tol=2e-3) for a, b in zip(ours, theirs))


def test_its_last_cell_packs_what_was_found(ran: dict[str, Any]) -> None:
    with zipfile.ZipFile(ran["folder"] / "t4-report.zip") as report:
        assert report.read("t4-doctor.txt") == b"said\n"
        assert json.loads(report.read("t4-lora.json")).keys() == {"model", *ran["figures"]}
