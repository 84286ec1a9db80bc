"""examples: those of examples/distributed in two processes over gloo, and chunks beside the whole sequence."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from tests.interpreters import forked, forked_group, free_port
from tests.plain import attention, check_function, some
from tests.support import load_file, randn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "distributed"
NEEDS = {
    "data_parallel": (),
    "gathered_keys": (),
    "ring": ("ring_flash_attn", "yunchang"),
    "ulysses": ("deepspeed",),
}


def process(rank: int, name: str, port: int) -> None:
    import flash_attn_compat

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    os.environ.update({**place, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""})
    flash_attn_compat.patch()
    sys.path.insert(0, str(FOLDER))  # as `python examples/distributed/NAME.py` does
    warnings.simplefilter("ignore")
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert sum(flash_attn_compat.backend_counts().values()) > 0


def test_every_script_is_run_or_needs_a_gpu() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NEEDS, "common", "torch_context_parallel"}


@pytest.mark.parametrize("name", some(NEEDS, 2))
def test_two_processes_find_the_answer_of_one(name: str) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name == "data_parallel" and TorchVersion(torch.__version__) < "2.6":
        pytest.skip("PyTorch has fully_shard from 2.6 on")
    forked_group(process, name, free_port())


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


# ---------------------------------------------------------------- comfyui


def comfyui_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, skip_reshape: bool = False,
    skip_output_reshape: bool = False, **kwargs: object,
) -> Tensor:  # fmt: skip
    """As ComfyUI's attention over PyTorch's."""
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_the_comfyui_node_answers_as_the_attention_in_its_place(
    skip_output_reshape: bool, skip_reshape: bool, dtype: torch.dtype, masked: bool
) -> None:
    node = load_file(EXAMPLES / "comfyui" / "__init__.py").NODE_CLASS_MAPPINGS["FlashAttnCompat"]()
    model = SimpleNamespace(model_options={"transformer_options": {"other": 1}})
    model.clone = lambda: SimpleNamespace(model_options=dict(model.model_options))
    options = node.patch(model)[0].model_options["transformer_options"]
    assert options["other"] == 1 and model.model_options == {"transformer_options": {"other": 1}}
    rows, keys = ((2, 3, 9, 16), (2, 3, 7, 16)) if skip_reshape else ((2, 9, 48), (2, 7, 48))
    qkv = [randn(*shape).to(dtype) for shape in (rows, keys, keys)]
    given = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape, "transformer_options": options}
    given |= {"mask": randn(9, 7).to(dtype)} if masked else {}
    expected = comfyui_attention(*qkv, heads=3, **given)
    out = options["optimized_attention_override"](comfyui_attention, *qkv, heads=3, **given)
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
