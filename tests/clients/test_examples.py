"""examples, the notebook among them; attention over two processes, by examples and by libraries."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import math
import os
import runpy
import sys
import warnings
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

import flash_attn_compat
from flash_attn_compat import cli
from tests.clients import notebook, ring_worker
from tests.clients.ring_worker import NHEADS, Case, contiguous, zigzag
from tests.forms.inputs import randn
from tests.forms.plain import attention, check_function, pairwise, some
from tests.forms.support import in_group, load_file
from tests.tools.interpreters import forked, forked_group
from verify import cli as verify_cli

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "distributed"
NEEDS = {
    "gathered_keys": (),
    "data_parallel": (),
    "ring": ("ring_flash_attn", "yunchang"),
    "ulysses": ("deepspeed",),
}


def process(rank: int, name: str, port: int) -> None:
    import flash_attn_compat

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    # As under torchrun, whose agent has opened the port: one that was free a moment ago may be another process's.
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({**place, **meeting, "TORCHELASTIC_RESTART_COUNT": "0", "CUDA_VISIBLE_DEVICES": ""})
    flash_attn_compat.patch()
    sys.path.insert(0, str(FOLDER))  # as `python examples/distributed/NAME.py` does
    warnings.simplefilter("ignore")
    import common

    common.SEQLEN = 64  # of 512, which show nothing more
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert sum(flash_attn_compat.backend_counts().values()) > 0


def test_every_script_is_run_or_needs_a_gpu() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NEEDS, "common", "torch_context_parallel"}


@pytest.mark.parametrize("name", some(NEEDS, 2))  # FSDP2 and DDP are in tests/observers/test_distributed_tensors.py
def test_two_processes_find_the_answer_of_one(name: str) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name == "data_parallel" and TorchVersion(torch.__version__) < "2.6":
        pytest.skip("PyTorch has fully_shard from 2.6 on")
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    forked_group(process, name, store.port)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.5", reason="PyTorch 2.4 has no context_parallel")
def test_where_pytorchs_ring_would_be_wrong_the_script_says_so_and_stops() -> None:
    script = str(FOLDER / "torch_context_parallel.py")
    code = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as stop:
    print(stop.code)
"""
    assert "no operator for a CPU" in forked(code, CUDA_VISIBLE_DEVICES="").stdout


# -------------------------------------------------- ring-flash-attn, yunchang and DeepSpeed, against the whole sequence

SEQLEN, HEAD_DIM = [64], 16


def ring(rank: int) -> None:
    ring_worker.check_all("cpu", torch.float16)


def yunchang(rank: int) -> None:
    import yunchang
    from yunchang.kernels import AttnType

    # Processes of Ulysses and of the ring, implementation, how a tensor is cut, causal, whether backward.
    for ulysses, ring, implementation, cut, causal, backward in (
        (1, 2, "basic", contiguous, True, True),
        (1, 2, "basic", contiguous, False, True),
        (1, 2, "zigzag", zigzag, True, True),
        (2, 1, "basic", contiguous, True, False),  # backward, its ring of one sends to itself, which gloo cannot
    ):
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, 2)
        long_context = yunchang.LongContextAttention(ring_impl_type=implementation, attn_type=AttnType.FA)
        # bf16 rounds to 4e-3 and each partial gradient is rounded; a mistake would show as 0.1 and more.
        case = Case(partial(long_context, causal=causal), cut, False, causal)
        ring_worker.check(case, SEQLEN, HEAD_DIM, torch.bfloat16, (2e-2, 2e-2), nheads_k=NHEADS, backward=backward)


def ulysses(rank: int) -> None:
    os.environ.update({"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"})
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from flash_attn import flash_attn_func

    deepspeed.init_distributed("gloo", verbose=False)
    layer = DistributedAttention(flash_attn_func, dist.group.WORLD)
    case = Case(lambda q, k, v: layer(q, k, v, 0, causal=True), contiguous, False, True)
    ring_worker.check(case, SEQLEN, HEAD_DIM, torch.float64, (1e-9, 1e-9), nheads_k=NHEADS)


def member(rank: int, name: str) -> None:
    flash_attn_compat.patch()
    WORKERS[name](rank)
    assert sum(flash_attn_compat.backend_counts().values()) > 0


WORKERS = {"ring_flash_attn": ring, "yunchang": yunchang, "deepspeed": ulysses}


@pytest.mark.parametrize("name", WORKERS)
def test_every_variant_gives_output_and_gradients_of_the_whole_sequence(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    in_group(member, name)


# ---------------------------------------------------------------- comfyui


def comfyui_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, skip_reshape: bool = False,
    skip_output_reshape: bool = False, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """As ComfyUI's attention over PyTorch's, which knows the keywords scale and enable_gqa."""
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
    known = {name: kwargs[name] for name in ("scale", "enable_gqa", "is_causal") if name in kwargs}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **known)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def comfyui_node() -> Any:
    return load_file(EXAMPLES / "comfyui" / "__init__.py").NODE_CLASS_MAPPINGS["FlashAttnCompat"]()


def test_the_comfyui_node_adds_its_override_to_a_copy_of_the_model() -> None:
    model = SimpleNamespace(model_options={"transformer_options": {"other": 1}})
    model.clone = lambda: SimpleNamespace(model_options=dict(model.model_options))
    options = comfyui_node().patch(model)[0].model_options["transformer_options"]
    assert options.keys() == {"other", "optimized_attention_override"}
    assert model.model_options == {"transformer_options": {"other": 1}}


KEYWORDS = {
    "none": {},
    "scale": {"scale": 0.7, "low_precision_attention": False},
    "grouped heads": {"enable_gqa": True},
    "one that the node does not know": {"is_causal": True},
    "mask": {"mask": torch.tensor([[0.5, -1, 0.25]] * 3)},
}


@pytest.mark.parametrize(
    ("name", "skip_output_reshape", "skip_reshape", "dtype"),
    pairwise(KEYWORDS, (False, True), (False, True), (torch.float16, torch.float32)),
)
def test_the_comfyui_node_answers_as_the_attention_in_its_place(
    name: str, skip_output_reshape: bool, skip_reshape: bool, dtype: torch.dtype
) -> None:
    keywords = KEYWORDS[name]
    override = load_file(EXAMPLES / "comfyui" / "__init__.py").attention
    heads_k = 2 if "enable_gqa" in keywords else 4
    rows, keys = (randn(2, heads, 3, 16).to(dtype) for heads in (4, heads_k))
    qkv = rows, keys, keys.flip(2)
    if not skip_reshape:
        qkv = tuple(x.transpose(1, 2).flatten(2) for x in qkv)
    given = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape, "transformer_options": {}}
    given |= {name: value.to(dtype) if name == "mask" else value for name, value in keywords.items()}
    expected = comfyui_attention(*qkv, heads=4, **given)
    out = override(comfyui_attention, *qkv, heads=4, **given)
    torch.testing.assert_close(out, expected, rtol=4e-3, atol=4e-3)


# ---------------------------------------------------------------- blockwise_attention.py


@pytest.fixture(scope="module")
def example():
    return load_file(EXAMPLES / "blockwise_attention.py")


@pytest.mark.parametrize("chunks", [(16, 16), (16, 7), (5, 16), (100, 100)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_give_output_and_gradients_of_the_whole_sequence(example, chunks, causal, dtype):
    """Each block rounds its part of a gradient, hence some epsilons more."""
    check_function(
        lambda *qkv: example.blockwise_attention(*qkv, causal, *chunks),
        lambda *qkv: attention(*qkv, window=(-1, 0 if causal else -1)),
        *(randn(2, 45, heads, 16, seed=heads, dtype=dtype) for heads in (4, 2, 2)),
        epsilons=4,
    )


def test_the_example_runs_as_a_script(example, capsys):
    example.main()
    assert len(capsys.readouterr().out.splitlines()) == 2


# ---------------------------------------------------------------- the notebook

Cells = dict[str, str]


@pytest.fixture(scope="module")
def cells() -> Cells:
    """The code of each cell, by its id."""
    if missing := [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing} not installed")
    return notebook.cells()


@pytest.fixture
def helpers(cells: Cells) -> dict[str, Any]:
    """The namespace after the cell with helpers."""
    names: dict[str, Any] = {}
    notebook.run("helpers", cells[notebook.HELPERS], names)
    return names


def commands(cells: Cells) -> Iterator[list[str]]:
    """Return the arguments that cells give to flash-attn-compat, those for a GPU included."""
    for source in cells.values():
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "shell":
                words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
                if ast.unparse(call.args[0]) == "*verify":
                    yield ["verify", *words]
                elif "flash_attn_compat" in words:
                    yield words[words.index("flash_attn_compat") + 1 :]


def test_commands_of_all_cells_exist_and_the_first_can_name_a_kernel_that_faults(cells: Cells) -> None:
    assert [words[:2] for words in commands(cells)] == [
        ["verify", "--quick"], ["doctor"], ["tune", "--json"], ["verify", "bench"], ["verify", "report"]
    ]  # fmt: skip
    for name, *words in commands(cells):
        if name == "verify":
            verify_cli.build_parser().parse_args(words if words[0] in ("bench", "report") else ["compare", *words])
        else:
            cli._parser().parse_args([name, *words])
    calls = [node for node in ast.walk(ast.parse(cells["cell-4"])) if isinstance(node, ast.Call)]
    first, second = (ast.unparse(call) for call in calls)
    assert "'--quick'" in first and "CUDA_LAUNCH_BLOCKING='1'" in first and "'doctor'" in second


def test_the_notebook_is_kept_without_outputs_and_with_its_helpers_folded() -> None:
    found = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in found)
    (folded,) = (cell for cell in found if cell["metadata"].get("cellView") == "form")
    assert folded["id"] == notebook.HELPERS and folded["metadata"]["jupyter"] == {"source_hidden": True}


@pytest.mark.parametrize("stop", [True, False])
def test_a_failing_command_stops_the_notebook_or_is_reported_after_its_output(
    stop: bool, helpers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    failing = sys.executable, "-S", "-c", "print('said'); raise SystemExit(3)"
    with pytest.raises(RuntimeError, match="exit code 3") if stop else contextlib.nullcontext():
        helpers["shell"](*failing, stop=stop)
    said, *told = capsys.readouterr().out.splitlines()
    assert said == "said" and len(told) == (not stop) and all("exit code 3" in line for line in told)


def test_a_command_gets_the_memory_that_this_process_does_not_use(
    helpers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(helpers["gc"], "collect", lambda: done.append("collect"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    monkeypatch.setattr(helpers["subprocess"], "Popen", lambda *given, **options: done.append("start") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        helpers["shell"]("anything")
    assert done == ["collect", "empty", "start"]


def executed(sources: list[str], folder: Path) -> list[str]:
    """Run cells in a kernel as a notebook does; return the output of each."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    import nbformat

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    patience = {"timeout": 1200, "startup_timeout": 1200, "iopub_timeout": 1200}  # in seconds; a machine may be busy
    nbclient.NotebookClient(book, resources={"metadata": {"path": str(folder)}}, **patience).execute()
    return ["".join(output.get("text", "") for output in cell["outputs"]) for cell in book["cells"]]


def test_in_a_notebook_commands_print_few_lines_of_progress_and_no_escapes(cells: Cells, tmp_path: Path) -> None:
    """A kernel sets FORCE_COLOR, by which rich takes a pipe for a terminal."""
    command = (
        "from flash_attn_compat import progress\n"
        "for _ in progress.show_progress(range(60), str): pass\n"
        "from rich.console import Console; print(Console().width)"
    )
    look = "print(os.environ.get('FORCE_COLOR'))"
    run = f"print(len(shell(sys.executable, '-c', {command!r}).splitlines()))"
    *_, colour, shown = executed([cells["source"], cells[notebook.HELPERS], look, run], tmp_path)
    assert colour != "None\n", "else this test shows nothing"
    *progress, width, count = shown.splitlines()
    assert len(progress) == 21 and width == "120" and count == "22" and "\x1b" not in shown


@pytest.mark.thorough
def test_all_cells_run_in_a_kernel(cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.save_tiny_model(tmp_path / "tiny")
    monkeypatch.setenv("NOTEBOOK_MODEL", str(tmp_path / "tiny"))
    found = executed([*cells.values()], tmp_path)
    (checked,) = (text for text in found if "All well." in text)
    assert "PASS" in checked
    with zipfile.ZipFile(tmp_path / "t4-report.zip") as report:
        assert {"t4-answers.json", "t4-doctor.txt", "t4-lora.json"} <= {*report.namelist()}


@pytest.fixture(scope="module")
def ran(cells: Cells, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
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
            for name, source in cells.items():
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


def test_the_notebook_asks_for_its_source_before_it_installs(
    cells: Cells, helpers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTEBOOK_SOURCE", raising=False)
    notebook.run("source", cells["source"], helpers)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(RuntimeError, match="is a placeholder: put the package's address into SOURCE"):
        notebook.run("install", cells[notebook.INSTALL], helpers)


def test_the_notebooks_last_cell_packs_the_results(ran: dict[str, Any]) -> None:
    with zipfile.ZipFile(ran["folder"] / "t4-report.zip") as report:
        assert report.namelist() == ["t4-answers.json", "t4-doctor.txt", "t4-lora.json"]
        assert report.read("t4-doctor.txt") == b"said\n"
        assert json.loads(report.read("t4-lora.json")).keys() == {"model", *ran["figures"]}
