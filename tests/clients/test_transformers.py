"""transformers with every attn_implementation that leads to us, on a CPU, against eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flash_attn_compat

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.clients import models  # noqa: E402
from tests.clients.models import MODELS, NAMED, build, relative_error, run, token_ids  # noqa: E402

version = tuple(int(number) for number in transformers.__version__.split(".")[:2])


def each(*kinds: str, dtypes: bool = True) -> pytest.MarkDecorator:
    """Of the models of these kinds in each way, and in bf16 in the first."""
    cases = []
    for name, model in MODELS.items():
        for index, way in enumerate(model.ways if model.kind in kinds else ()):
            for dtype in (torch.float32, torch.bfloat16) if dtypes and index == 0 else (torch.float32,):
                cases.append(pytest.param(name, way, dtype, id=f"{name}, {way}, {dtype}"))
    return pytest.mark.parametrize(("name", "way", "dtype"), cases)


@pytest.fixture(autouse=True)
def served(request: pytest.FixtureRequest) -> Iterator[None]:
    """By registration, which needs no patching, or under the name; skip models that this transformers cannot run."""
    way = request.getfixturevalue("way") if "way" in request.fixturenames else NAMED
    name = request.getfixturevalue("name") if "name" in request.fixturenames else "llama"
    if reason := models.skip_reason(name, way):
        pytest.skip(reason)
    if way in (models.REGISTERED, models.SINKS):
        flash_attn_compat.register_with_transformers(way)
        yield
        return
    with flash_attn_compat.patched(hub_kernels=True):
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


def gradients(model, logits, weights):
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check(flash, got, eager, expected, limit, kept=...):
    """Outputs where they are kept, and the gradients in all parameters."""
    assert relative_error(got[kept], expected[kept]) <= limit
    weights = torch.zeros_like(expected)
    weights[kept] = torch.randn_like(expected[kept])
    ours, right = gradients(flash, got, weights), gradients(eager, expected, weights)
    assert ours.keys() == right.keys()
    scale = max(float(grad.abs().max()) for grad in right.values())
    worst = max(float((ours[name].float() - right[name].float()).abs().max()) for name in right)
    assert worst <= limit * scale, f"{worst / scale:.2e}"


@each("decoder", "encoder", "other")
def test_outputs_and_gradients_without_padding_equal_eager(name, way, dtype, calls):
    eager, flash = pair(name, dtype, way)
    inputs = models.inputs_of(name, eager.config)
    expected = run(eager, inputs)
    assert calls() == 0
    got = run(flash, inputs)
    assert calls() >= MODELS[name].attention_calls
    check(flash, got, eager, expected, models.tolerance(name, dtype))


@pytest.mark.parametrize("side", ["left", "right"])
@each("decoder", "encoder", dtypes=False)
def test_outputs_and_gradients_with_padding_equal_eager_at_the_tokens(name, way, dtype, side, calls):
    eager, flash = pair(name, dtype, way)
    ids, mask = padded(side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if MODELS[name].kind == "decoder":
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    expected, got = run(eager, inputs), run(flash, inputs)
    assert calls() >= MODELS[name].attention_calls
    check(flash, got, eager, expected, models.tolerance(name, dtype), mask.bool())


@each("decoder")
def test_packed_sequences_equal_eager_on_each_by_itself(name, way, dtype, calls):
    eager, flash = pair(name, dtype, way)
    lengths = [7, 1, 10]
    ids = token_ids(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.cat([run(eager, {"input_ids": part}) for part in ids.split(lengths, dim=1)], dim=1)
    got = run(flash, {"input_ids": ids, "position_ids": positions})
    assert calls() == MODELS[name].attention_calls
    check(flash, got, eager, expected, models.tolerance(name, dtype))


@each("decoder", dtypes=False)
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


@pytest.mark.parametrize("way", [NAMED, models.REGISTERED])
def test_a_model_in_fp32_trains_under_autocast(way, calls):
    eager, flash = pair("llama", torch.float32, way)
    ids = token_ids(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (run(model, {"input_ids": ids}) for model in (eager, flash))
    assert calls() == MODELS["llama"].attention_calls
    check(flash, got, eager, expected, 4e-2)


# For fp32 transformers logs a warning from inside the graph, which breaks it with any flash-attn.
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
    check(flash, got, eager, expected, 2e-6)


def test_a_model_switched_after_its_creation_or_loaded_from_files_equals_eager(tmp_path, calls):
    eager = build("llama", "eager")
    ids = {"input_ids": token_ids(2, 12)}
    expected = run(eager, ids)
    eager.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_attention_2").eval()
    assert relative_error(run(loaded, ids), expected) <= 2e-6
    assert calls() == 2
    if not hasattr(eager, "set_attn_implementation"):
        pytest.skip("this transformers cannot switch a model")
    eager.set_attn_implementation("flash_attention_2")
    assert relative_error(run(eager, ids), expected) <= 2e-6
    assert calls() == 4
