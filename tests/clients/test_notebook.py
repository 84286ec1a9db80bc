"""examples/t4.ipynb: its cells run from top to bottom and give other programs valid arguments."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import math
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import cli
from tests.clients import notebook
from verify import cli as verify_cli

MISSING = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed")


def commands() -> Iterator[list[str]]:
    """Return the arguments that cells give to flash-attn-compat, those for a GPU included."""
    for source in notebook.cells().values():
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "shell":
                words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
                if ast.unparse(call.args[0]) == "*verify":
                    yield ["verify", *words]
                elif "flash_attn_compat" in words:
                    yield words[words.index("flash_attn_compat") + 1 :]


def test_commands_of_all_cells_exist() -> None:
    assert [words[:2] for words in commands()] == [
        ["verify", "--quick"], ["doctor"], ["tune", "--json"], ["verify", "bench"], ["verify", "report"]
    ]  # fmt: skip
    for name, *words in commands():
        if name == "verify":
            verify_cli.build_parser().parse_args(words if words[0] in ("bench", "report") else ["compare", *words])
        else:
            cli._parser().parse_args([name, *words])


def test_the_notebook_is_kept_without_outputs() -> None:
    found = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in found)


@pytest.mark.parametrize("stop", [True, False])
def test_a_failing_command_stops_the_notebook_or_is_reported_after_its_output(
    stop: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    notebook.run("helpers", notebook.cells()[notebook.HELPERS], names)
    failing = sys.executable, "-S", "-c", "print('said'); raise SystemExit(3)"
    with pytest.raises(RuntimeError, match="exit code 3") if stop else contextlib.nullcontext():
        names["shell"](*failing, stop=stop)
    said, *told = capsys.readouterr().out.splitlines()
    assert said == "said" and len(told) == (not stop) and all("exit code 3" in line for line in told)


def test_its_first_command_can_name_a_kernel_that_faults() -> None:
    calls = [node for node in ast.walk(ast.parse(notebook.cells()["cell-4"])) if isinstance(node, ast.Call)]
    first, second = (ast.unparse(call) for call in calls)
    assert "'--quick'" in first and "CUDA_LAUNCH_BLOCKING='1'" in first and "'doctor'" in second


def test_a_command_gets_the_memory_that_this_process_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    notebook.run("helpers", notebook.cells()[notebook.HELPERS], names)
    done: list[str] = []
    monkeypatch.setattr(names["gc"], "collect", lambda: done.append("collect"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    monkeypatch.setattr(names["subprocess"], "Popen", lambda *given, **options: done.append("start") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        names["shell"]("anything")
    assert done == ["collect", "empty", "start"]


def executed(sources: list[str], folder: Path) -> list[str]:
    """Run cells in a kernel as a notebook does; return the output of each."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    book = nbformat.v4.new_notebook(cells=cells)
    patience = {"timeout": 1200, "startup_timeout": 1200, "iopub_timeout": 1200}  # in seconds; a machine may be busy
    nbclient.NotebookClient(book, resources={"metadata": {"path": str(folder)}}, **patience).execute()
    return ["".join(output.get("text", "") for output in cell["outputs"]) for cell in book["cells"]]


def test_in_a_notebook_commands_print_few_lines_of_progress_and_no_escapes(tmp_path: Path) -> None:
    """A kernel sets FORCE_COLOR, by which rich takes a pipe for a terminal."""
    command = (
        "from flash_attn_compat import progress\n"
        "for _ in progress.show_progress(range(60), str): pass\n"
        "from rich.console import Console; print(Console().width)"
    )
    look = "print(os.environ.get('FORCE_COLOR'))"
    run = f"print(len(shell(sys.executable, '-c', {command!r}).splitlines()))"
    cells = notebook.cells()
    *_, colour, shown = executed([cells["source"], cells[notebook.HELPERS], look, run], tmp_path)
    assert colour != "None\n", "else this test shows nothing"
    *progress, width, count = shown.splitlines()
    assert len(progress) == 21 and width == "120" and count == "22" and "\x1b" not in shown


@pytest.mark.thorough
def test_all_cells_run_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.save_tiny_model(tmp_path / "tiny")
    monkeypatch.setenv("NOTEBOOK_MODEL", str(tmp_path / "tiny"))
    found = executed([*notebook.cells().values()], tmp_path)
    (checked,) = (text for text in found if "All well." in text)
    assert "PASS" in checked
    with zipfile.ZipFile(tmp_path / "t4-report.zip") as report:
        assert {"t4-answers.json", "t4-doctor.txt", "t4-lora.json"} <= {*report.namelist()}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The namespace after its cells, with the commands that they ran as `told`."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook.save_tiny_model(folder / "tiny")
    names: dict[str, Any] = {"folder": folder, "told": []}

    def shell(*command: str, stop: bool = True, **variables: str) -> str:
        names["told"].append(command)
        for file in command:
            if file.endswith(".json"):
                Path(file).touch()
        return "said\n"

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NOTEBOOK_MODEL", str(folder / "tiny"))
        patch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU takes minutes for the cells that measure it
        (folder / "t4.ipynb").touch()  # as where it is saved beside its results
        try:
            for name, source in notebook.cells().items():
                notebook.run(name, source, names)
                if name == notebook.HELPERS:
                    names["shell"] = shell
        finally:
            flash_attn_compat.unpatch()
    return names


def test_cells_run_from_top_to_bottom_and_install_nothing_that_is_there(ran: dict[str, Any]) -> None:
    assert ran["missing"] == []
    assert [command[1:4] for command in ran["told"]] == [("-m", "flash_attn_compat", at) for at in ("verify", "doctor")]


def test_the_notebooks_lora_learns_as_with_sdpa(ran: dict[str, Any]) -> None:
    ours, theirs = (ran["figures"][f"LoRA, {name}"]["losses"] for name in ("flash_attention_2", "SDPA"))
    assert sum(ran["served"].values()) == len(ours) * 2, "a forward of two layers for each step"
    assert ours[-1] < ours[0] and all(math.isclose(a, b, rel_tol=2e-3) for a, b in zip(ours, theirs))


def test_the_notebooks_functions_keep_documents_apart_and_scores_below_the_cap(ran: dict[str, Any]) -> None:
    """The cell's result, against the softmax of its formula in fp64."""
    q, k, v = (ran[name].double() for name in "qkv")
    scores = 20 * torch.tanh(q @ k.mT / 8 / 20)
    tokens = torch.arange(ran["TOKENS"])
    seen = (ran["document"][:, None] == ran["document"]) & (tokens[:, None] >= tokens)
    torch.testing.assert_close(ran["out"].double(), scores.where(seen, -math.inf).softmax(-1) @ v, atol=2e-3, rtol=2e-3)


def test_the_notebook_asks_for_its_source_before_it_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = notebook.cells()
    names: dict[str, Any] = {}
    monkeypatch.delenv("NOTEBOOK_SOURCE", raising=False)
    for name in ("source", notebook.HELPERS):
        notebook.run(name, cells[name], names)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(RuntimeError, match="is a placeholder: put the package's address into SOURCE"):
        notebook.run("install", cells[notebook.INSTALL], names)


def test_helper_cells_are_folded_and_the_source_is_not() -> None:
    found = {
        cell["id"]: cell["metadata"] for cell in json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    }
    assert [name for name, metadata in found.items() if metadata.get("cellView") == "form"] == [notebook.HELPERS]
    assert found[notebook.HELPERS]["jupyter"] == {"source_hidden": True}


def test_the_notebooks_last_cell_packs_the_results(ran: dict[str, Any]) -> None:
    with zipfile.ZipFile(ran["folder"] / "t4-report.zip") as report:
        assert report.namelist() == ["t4-answers.json", "t4-doctor.txt", "t4-lora.json"]
        assert report.read("t4-doctor.txt") == b"said\n"
        assert json.loads(report.read("t4-lora.json")).keys() == {"model", *ran["figures"]}
