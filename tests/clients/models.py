"""Tiny random models of transformers, the inputs they take, alike in every version of it, and a copy beside each."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from flash_attn_compat.dropin import hub_kernels

VOCABULARY = 97
NAMED, REGISTERED, SINKS, FA4 = "flash_attention_2", "fa2_compat", "fa2_compat_sinks", "flash_attention_4"
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ENCODER = SIZES | TOKENS | {"max_position_embeddings": 128}
DECODER = ENCODER | {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Model:
    """A class and configuration of transformers by name; `inputs` makes the model's inputs other than token ids."""

    kind: str  # decoder, encoder, other
    config: str
    head: str
    options: dict[str, Any]
    inputs: Callable[[Any], dict[str, Tensor]] | None = None
    attention_calls: int = 2
    ways: tuple[str, ...] = (NAMED, REGISTERED)  # values of attn_implementation that lead to us


def _whisper_inputs(config: Any) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (2, 9)),
    }


def _vit_inputs(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}


def _qwen2_vl_inputs(config: Any) -> dict[str, Tensor]:
    # Two images of different size: 4 x 4 and 4 x 8 patches, merged 2 x 2 into 4 and 8 tokens.
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    vision = config.vision_config
    dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    tokens = torch.randint(3, 80, (1, 6))
    image = lambda count: torch.full((1, count), config.image_token_id)  # noqa: E731
    start = torch.full((1, 1), config.vision_start_token_id)
    ids = torch.cat([tokens[:, :2], start, image(4), tokens[:, 2:4], start, image(8), tokens[:, 4:]], dim=1)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(16 + 32, dim), "image_grid_thw": grid}
    inputs["attention_mask"] = torch.ones_like(ids)
    # Newer versions tell images from text by this; run() leaves it out for the others.
    inputs["mm_token_type_ids"] = (ids == config.image_token_id).int()
    return inputs


WINDOW = {"sliding_window": 5}
DECODERS = NAMED, REGISTERED, FA4
WITH_REVISION = "kernels-community/flash-attn2@v1:flash_attn_varlen_func"
QWEN_VISION = dict(
    depth=2, embed_dim=64, hidden_size=64, num_heads=4, mlp_ratio=2, patch_size=4, in_channels=3, in_chans=3
)
MODELS: dict[str, Model] = {
    "llama": Model("decoder", "LlamaConfig", "LlamaForCausalLM", DECODER, ways=DECODERS),
    "mistral with a window": Model("decoder", "MistralConfig", "MistralForCausalLM", DECODER | WINDOW, ways=DECODERS),
    "gemma2 with softcap and window": Model(
        "decoder", "Gemma2Config", "Gemma2ForCausalLM",
        DECODER | WINDOW | {"attn_logit_softcapping": 5.0, "head_dim": 16, "query_pre_attn_scalar": 16},
        ways=DECODERS,
    ),
    "mimo with sinks and values narrower than keys": Model(
        "decoder", "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM",
        DECODER | WINDOW | {"head_dim": 24, "v_head_dim": 16, "mlp_layer_types": ["dense", "dense"]}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        ways=(FA4,),
    ),
    "gpt-oss with sinks and a window": Model(
        "decoder", "GptOssConfig", "GptOssForCausalLM",
        DECODER | WINDOW | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        # transformers itself makes a hub's name of flash_attention_2.
        ways=(SINKS, NAMED, *hub_kernels.NAMES, WITH_REVISION),
    ),
    "bert": Model("encoder", "BertConfig", "BertForMaskedLM", ENCODER),
    "modernbert": Model(
        "encoder", "ModernBertConfig", "ModernBertForMaskedLM",
        ENCODER | {"num_hidden_layers": 4, "local_attention": 8, "reference_compile": False}
        | {"cls_token_id": 1, "sep_token_id": 2},
        attention_calls=4, ways=(NAMED,),
    ),
    "whisper": Model(
        "other", "WhisperConfig", "WhisperForConditionalGeneration",
        TOKENS | {"d_model": 64, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
        | {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
        | {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "decoder_start_token_id": 1},
        _whisper_inputs, attention_calls=6,
    ),
    "vit": Model(
        "other", "ViTConfig", "ViTForImageClassification", SIZES | {"image_size": 16, "patch_size": 4},
        _vit_inputs, ways=(NAMED,),
    ),
    "qwen2-vl": Model(
        "other", "Qwen2VLConfig", "Qwen2VLForConditionalGeneration",
        DECODER | {"vision_config": QWEN_VISION, "image_token_id": 90, "video_token_id": 91}
        | {"vision_start_token_id": 92, "vision_end_token_id": 93}
        | {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}},
        _qwen2_vl_inputs, attention_calls=4, ways=(NAMED,),
    ),
}  # fmt: skip


def skip_reason(name: str, way: str = NAMED) -> str | None:
    """Why the installed transformers cannot run this model in this way (it came later, or its support did)."""
    if way in (REGISTERED, SINKS) and importlib.util.find_spec("transformers.masking_utils") is None:
        return f"transformers {transformers.__version__} has no registry of masks"
    flash_utils = transformers.modeling_flash_attention_utils
    if way.startswith(hub_kernels.NAMES) and not hasattr(flash_utils, "FLASH_ATTN_KERNEL_FALLBACK"):
        return f"transformers {transformers.__version__} loads hub kernels in another way"
    if way == FA4 and 4 not in getattr(flash_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}):
        return f"transformers {transformers.__version__} has no {FA4}"
    model = getattr(transformers, MODELS[name].head, None)
    if model is None:
        return f"transformers {transformers.__version__} has no {MODELS[name].head}"
    if not (getattr(model, "_supports_flash_attn", False) or getattr(model, "_supports_flash_attn_2", False)):
        return f"{MODELS[name].head} of transformers {transformers.__version__} does not support flash-attn"
    return None


def tolerance(name: str, dtype: torch.dtype) -> float:
    """How far from eager the output may be, relative to its largest value."""
    # ModernBERT had attention of its own up to transformers 5.0, which rounds q, k and v to bf16 even in fp32 models.
    rounds = name == "modernbert" and hasattr(
        transformers.models.modernbert.modeling_modernbert, "ModernBertUnpaddedRotaryEmbedding"
    )
    if rounds or dtype is torch.bfloat16:
        return 4e-2
    return 1e-5 if name.startswith(("gpt-oss", "mimo")) else 2e-6


def _flash_sees_one_key_more() -> bool:
    """Up to 4.53 transformers gives flash-attn a window that holds one key more than its own mask for eager."""
    return "(sliding_window, sliding_window)" in inspect.getsource(transformers.modeling_flash_attention_utils)


def build(name: str, implementation: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The model in evaluation mode; the same weights for the same seed."""
    model = MODELS[name]
    # from_config writes into the configuration that it is given, so every model gets its own.
    options = copy.deepcopy(model.options)
    if implementation == "eager" and "sliding_window" in options and _flash_sees_one_key_more():
        options["sliding_window"] += 1
    config = getattr(transformers, model.config)(**options)
    torch.manual_seed(seed)
    built = getattr(transformers, model.head)._from_config(config, attn_implementation=implementation)
    assert (built.config._attn_implementation == "eager") == (implementation == "eager")
    # Some initial weights are so small that attention would hardly show in the output.
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif "sink" in parameter_name:
                parameter.normal_()
    return built.to(dtype).eval()


def token_ids(batch: int, seqlen: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, seqlen))


def inputs_of(name: str, config: Any) -> dict[str, Tensor]:
    """Inputs without padding."""
    make = MODELS[name].inputs
    return make(config) if make else {"input_ids": token_ids(2, 12)}


def run(model: Any, inputs: dict[str, Any]) -> Tensor:
    dtype = next(model.parameters()).dtype
    accepted = inspect.signature(model.forward).parameters
    floats = {name: x.to(dtype) for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    cast = inputs | floats
    if "use_cache" in accepted:
        cast["use_cache"] = False  # with a cache, some models of 4.48 refuse padding on the right
    if "mm_token_type_ids" not in accepted:
        cast.pop("mm_token_type_ids", None)
    return model(**cast).logits


def relative_error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().float(), expected.detach().float()
    return float((got - expected).abs().max() / expected.abs().max())


# ----------------------------------- a model beside its copy with another attention, over batches padded on either side

SIDES = ("none", "left", "right")


def mask_of(ids: Tensor, side: str) -> Tensor:
    """1 for tokens, 0 for padding on this side, of a third of the last sequence."""
    mask = torch.ones_like(ids)
    length = ids.shape[1]
    if side != "none":
        mask[-1, slice(0, length // 3) if side == "left" else slice(length - length // 3, length)] = 0
    return mask


def pair(head: Any, options: dict[str, Any], implementation: str, scale: float = 1.0) -> tuple[Any, Any]:
    """The model with eager attention and with this one, with the same weights; ``scale`` makes attention less even."""
    torch.manual_seed(0)
    eager, other = (
        head._from_config(head.config_class(**options), attn_implementation=way).eval()
        for way in ("eager", implementation)
    )
    with torch.no_grad():
        for weight in eager.parameters():
            weight.mul_(scale)
    other.load_state_dict(eager.state_dict())
    return eager, other


def check(eager: Any, other: Any, inputs: dict[str, Any], kept: Tensor | None = None, limit: float = 1e-5) -> None:
    """Logits (at the kept tokens) and the gradients of all parameters are eager's."""
    check_outputs((eager, other), [run(model, inputs) for model in (eager, other)], kept, limit)


def check_outputs(models: tuple[Any, Any], outputs: list[Tensor], kept: Tensor | None, limit: float) -> None:
    """As ``check``, of what eager and the other model returned."""
    logits, gradients = [], []
    for model, out in zip(models, outputs):
        logits.append(out if kept is None else out * kept[..., None])
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        (logits[-1] * weights).sum().backward()
        named = model.named_parameters()
        gradients.append({name: weight.grad.float() for name, weight in named if weight.grad is not None})
    assert relative_error(logits[1], logits[0]) <= limit
    assert gradients[0].keys() == gradients[1].keys()
    scale = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    worst = max(float((gradients[1][name] - right).abs().max()) for name, right in gradients[0].items())
    assert worst <= limit * scale, f"{worst / scale:.1e}"
