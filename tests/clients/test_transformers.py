"""transformers with every attn_implementation that leads to us, on a CPU, against eager; the operators of a step."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import flash_attn_compat
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.dropin import hub_kernels
from tests.kernels import fused_on_cpu

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.clients import models  # noqa: E402
from tests.clients.models import FA4, MODELS, NAMED, build, check, check_outputs, relative_error, run, token_ids  # noqa: E402

FLASH_UTILS = "transformers.modeling_flash_attention_utils"  # which takes long to import
version = tuple(int(number) for number in transformers.__version__.split(".")[:2])


def each(*kinds: str, dtypes: bool = False) -> pytest.MarkDecorator:
    """Of the models of these kinds in each way; with dtypes in bf16 in the first, else the hub's names are thorough."""
    cases = []
    for name, model in MODELS.items():
        for index, way in enumerate(model.ways if model.kind in kinds else ()):
            for dtype in (torch.float32, torch.bfloat16) if dtypes and index == 0 else (torch.float32,):
                is_late = way in hub_kernels.NAMES[1:] or (way.startswith("kernels-community") and not dtypes)
                marks = [pytest.mark.thorough] * is_late
                cases.append(pytest.param(name, way, dtype, id=f"{name}, {way}, {dtype}", marks=marks))
    return pytest.mark.parametrize(("name", "way", "dtype"), cases)


in_its_way = pytest.mark.usefixtures("served_in_its_way")


@pytest.fixture
def served_in_its_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """By registration, which needs no patching, or under the name; skip models that this transformers cannot run."""
    way = request.getfixturevalue("way") if "way" in request.fixturenames else NAMED
    name = request.getfixturevalue("name") if "name" in request.fixturenames else "llama"
    if reason := models.skip_reason(name, way):
        pytest.skip(reason)
    if way in (models.REGISTERED, models.SINKS):
        flash_attn_compat.register_with_transformers(way)
        yield
        return
    with flash_attn_compat.patched(hub_kernels=way != FA4, interfaces=("fa4",) * (way == FA4)):
        yield


def pair(name: str, dtype: torch.dtype, way: str = NAMED) -> tuple[Any, Any]:
    return build(name, "eager", dtype), build(name, way, dtype)


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of three texts, and their mask."""
    ids = token_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if side == "left" else slice(7, 12)] = 0
    mask[1, 0 if side == "left" else 11] = 0
    return ids, mask


@in_its_way
@each("decoder", "encoder", "other", dtypes=True)
def test_outputs_and_gradients_without_padding_equal_eager(name, way, dtype, calls):
    eager, flash = pair(name, dtype, way)
    check(eager, flash, models.inputs_of(name, eager.config), limit=models.tolerance(name, dtype))
    assert calls() >= MODELS[name].attention_calls


@in_its_way
@pytest.mark.parametrize("side", ["left", "right"])
@each("decoder", "encoder")
def test_outputs_and_gradients_with_padding_equal_eager_at_the_tokens(name, way, dtype, side, calls):
    eager, flash = pair(name, dtype, way)
    ids, mask = padded(side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if MODELS[name].kind == "decoder":
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    check(eager, flash, inputs, mask, models.tolerance(name, dtype))
    assert calls() >= MODELS[name].attention_calls


@in_its_way
@each("decoder")
def test_packed_sequences_equal_eager_on_each_by_itself(name, way, dtype, calls):
    eager, flash = pair(name, dtype, way)
    lengths = [7, 1, 10]
    ids = token_ids(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.cat([run(eager, {"input_ids": part}) for part in ids.split(lengths, dim=1)], dim=1)
    got = run(flash, {"input_ids": ids, "position_ids": positions})
    assert calls() == MODELS[name].attention_calls
    check_outputs((eager, flash), [expected, got], None, models.tolerance(name, dtype))


@in_its_way
@each("decoder")
def test_greedy_generation_from_left_padded_prompts_gives_the_same_tokens(name, way, dtype, calls):
    eager, flash = pair(name, dtype, way)
    ids, mask = padded("left")
    ids[mask == 0] = 0
    options = dict(attention_mask=mask, max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0)
    expected = eager.generate(ids, **options)
    assert calls() == 0
    got = flash.generate(ids, **options)
    assert calls() >= 10 * MODELS[name].attention_calls
    assert torch.equal(got, expected)


@in_its_way
@pytest.mark.parametrize("way", [NAMED, models.REGISTERED])
def test_a_model_in_fp32_trains_under_autocast(way, calls):
    eager, flash = pair("llama", torch.float32, way)
    with torch.autocast("cpu", torch.bfloat16):
        check(eager, flash, {"input_ids": token_ids(2, 12)}, limit=4e-2)
    assert calls() == MODELS["llama"].attention_calls


# For fp32 transformers logs a warning from inside the graph, which breaks it with any flash-attn.
@in_its_way
@pytest.mark.skipif(
    version < (4, 57),
    reason="older ones branch on the values of position_ids, which breaks the graph with any flash-attn",
)
def test_a_decoder_compiles_as_one_graph_forward_and_backward(calls):
    eager, flash = pair("llama", torch.float64)
    ids = token_ids(2, 12)
    expected = run(eager, {"input_ids": ids})
    run(flash, {"input_ids": ids})  # transformers loads its flash functions outside the graph
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: flash(input_ids=ids, use_cache=False).logits, fullgraph=True, backend="eager")
    compiled(ids)
    before = calls()
    got = compiled(ids)
    assert calls() == before + 2
    check_outputs((eager, flash), [expected, got], None, 2e-6)


@in_its_way
@pytest.mark.parametrize("way", [NAMED, FA4])
def test_a_model_switched_after_its_creation_or_loaded_from_files_equals_eager(way, tmp_path, calls):
    eager = build("llama", "eager")
    ids = {"input_ids": token_ids(2, 12)}
    expected = run(eager, ids)
    eager.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=way).eval()
    assert relative_error(run(loaded, ids), expected) <= 2e-6
    assert calls() == 2
    if not hasattr(eager, "set_attn_implementation"):
        pytest.skip("this transformers cannot switch a model")
    eager.set_attn_implementation(way)
    assert relative_error(run(eager, ids), expected) <= 2e-6
    assert calls() == 4


def test_the_check_for_flash_attention_4_is_transformers_own_again_after_the_block() -> None:
    utils = importlib.import_module(FLASH_UTILS)
    if not hasattr(utils, "is_flash_attn_4_available"):
        pytest.skip("this transformers has no flash_attention_4")
    original = utils.is_flash_attn_4_available
    with flash_attn_compat.patched(interfaces=("fa4",)):
        assert utils.is_flash_attn_4_available() and utils.is_flash_attn_4_available is not original
    assert utils.is_flash_attn_4_available is transformers.utils.is_flash_attn_4_available is original


# -------------------------------------------------- code downloaded at run time, with unguarded imports from flash_attn

MODELING = '''
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb
from transformers import PreTrainedModel

from .configuration_tiny import TinyConfig


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.qkv = torch.nn.Linear(config.width, 3 * config.width)
        self.post_init()

    def forward(self, states, mask):
        """Causal attention over padded rows, heads of 8, rotary on queries and keys."""
        batch, seqlen, width = states.shape
        angles = torch.arange(seqlen)[:, None] * 0.1 * torch.arange(1, 5)
        q, k, v = self.qkv(states).view(batch, seqlen, 3, -1, 8).unbind(2)
        q, k = (apply_rotary_emb(x.contiguous(), angles.cos(), angles.sin()) for x in (q, k))
        (q, indices, cu_seqlens, longest, _), (k, *_), (v, *_) = (unpad_input(x, mask) for x in (q, k, v))
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
        return pad_input(out, indices, batch, seqlen)
'''
CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, width=16, **options):
        self.width = width
        super().__init__(**options)
"""


def test_it_is_refused_without_the_name_and_loads_with_it(tmp_path, monkeypatch, calls):
    dynamic = importlib.import_module("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny_remote"
    folder.mkdir()
    (folder / "modeling_tiny.py").write_text(MODELING)
    (folder / "configuration_tiny.py").write_text(CONFIGURATION)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    with pytest.raises(ImportError, match="flash_attn"):
        dynamic.get_class_from_dynamic_module("modeling_tiny.TinyModel", str(folder))
    with flash_attn_compat.patched():
        model_class = dynamic.get_class_from_dynamic_module("modeling_tiny.TinyModel", str(folder))
        model = model_class(model_class.config_class()).eval()
        states, mask = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.bool)
        mask[1, 4:] = False
        out = model(states, mask)
        assert calls() == 1
        alone = model(states[1:, :4], mask[1:, :4])
    assert torch.equal(out[1, 4:], torch.zeros_like(out[1, 4:]))
    torch.testing.assert_close(out[1:, :4], alone)


# ---------- PyTorch's operators in a decoding step, layer by layer, besides the one launch, which computes nothing here

LAYERS = 2
LOOKS = "resolve_neg"  # gives back what it is given, unless that is a negated view


@pytest.fixture
def step(monkeypatch):
    """The operators of each call of our functions in a greedy generation, as PyTorch's profiler sees them."""
    utilities = importlib.import_module(FLASH_UTILS)
    if not hasattr(utilities, "_flash_varlen_fn"):
        pytest.skip("this transformers keeps flash-attn's functions elsewhere")
    fused_on_cpu.record(monkeypatch, number=75)
    monkeypatch.setattr(nvrtc.driver(), "launch", lambda *what: None)
    names = "_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn"

    def watched(name, original):
        def call(*args, **kwargs):
            with record_function(name):
                return original(*args, **kwargs)

        return call

    def operators(event):
        inner = (child.name.removeprefix("aten::") for child in event.cpu_children)
        return event.name, [name for name in inner if name != LOOKS]

    def run(ids, mask):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        ours = [event for event in profiler.events() if event.name in names]
        return [operators(event) for event in sorted(ours, key=lambda event: event.time_range.start)]

    with flash_attn_compat.patched(), monkeypatch.context() as watching:
        model = build("llama", NAMED, torch.float16)
        model.generation_config.eos_token_id = None
        model(token_ids(1, 4))  # loads flash-attn's functions
        for name in names:
            watching.setattr(utilities, name, watched(name, getattr(utilities, name)))
        yield run


def test_one_sequence_takes_a_launch_and_no_operator(step):
    calls = step(token_ids(1, 9), torch.ones(1, 9, dtype=torch.long))
    assert calls[-LAYERS:] == [("_flash_fn", [])] * LAYERS


def test_a_left_padded_batch_takes_a_launch_and_its_padding(step):
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[0, :3] = mask[2, :5] = 0
    calls = step(token_ids(4, 9), mask)
    # A CPU looks whether the lengths are equal; a GPU would have to be waited for, and is not asked. The key asks, and
    # for a new length, which the first layer prepares, the checked call and the plan.
    prepares, hits = (("_flash_varlen_fn", ["equal"] * looks) for looks in (3, 1))
    pads = ("_pad_fn", ["zeros", "index_put_", "view"])
    assert calls[-2 * LAYERS :] == [prepares, pads] + [hits, pads] * (LAYERS - 1)
