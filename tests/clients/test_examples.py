"""examples: those of examples/distributed in two processes over gloo, and chunks beside the whole sequence."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from tests.forms.inputs import randn
from tests.forms.plain import attention, check_function, some
from tests.forms.support import load_file
from tests.tools.interpreters import forked, forked_group

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


@pytest.mark.parametrize("name", some(NEEDS, 2))
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
def test_the_comfyui_node_answers_as_the_attention_in_its_place(
    keywords: dict[str, Any], skip_output_reshape: bool, skip_reshape: bool, dtype: torch.dtype
) -> None:
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
