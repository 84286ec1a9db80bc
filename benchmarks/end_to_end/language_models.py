"""transformers' models: prefill, generation, training on packed sequences."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end.program import Answer, NotHere, Prepared, Setting, lengths, margins

Options = dict[str, Any]
QWEN3_06B: Options = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=16384,
)  # fmt: skip
# A fifth of Gemma 2's layers: softcap, and every second layer a window.
GEMMA2: Options = dict(
    vocab_size=32768, hidden_size=2304, intermediate_size=9216, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, query_pre_attn_scalar=128,
    sliding_window=1024, attn_logit_softcapping=50.0, max_position_embeddings=16384,
)  # fmt: skip
# A quarter of the layers of Llama 3.2 1B.
LLAMA: Options = dict(
    vocab_size=32768, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=16384,
)  # fmt: skip
MODERNBERT: Options = {}  # the configuration's defaults are ModernBERT-base
TINY: Options = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
_MODERNBERT_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
TINY_OF: dict[str, Options] = {
    "Qwen3": TINY | dict(head_dim=16),
    "Gemma2": TINY | dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8, attn_logit_softcapping=5.0),
    "Llama": TINY,
    "ModernBert": TINY | dict(num_hidden_layers=4, local_attention=8) | _MODERNBERT_TOKENS,
}
# So that gradients in half precision do not vanish, as a GradScaler has it.
_LOSS_SCALE = 1024.0


def _model(family: str, real: Options, head: str, setting: Setting) -> Any:
    """The same weights for each implementation, large enough that attention shows in the outputs."""
    if importlib.util.find_spec("transformers") is None:
        raise NotHere("transformers is not installed")
    import transformers

    options = TINY_OF[family] if setting.tiny else real
    if family in ("Qwen3", "Llama", "Gemma2"):
        # Tied embeddings of random weights repeat one token for ever.
        options = options | dict(tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = getattr(transformers, f"{family}Config")(**options)
    implementation = setting.implementation.in_transformers
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = getattr(transformers, head)._from_config(
            config, attn_implementation=implementation, dtype=setting.dtype
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5)
    if model.config._attn_implementation != implementation:
        raise RuntimeError(f"transformers chose {model.config._attn_implementation} instead of {implementation}")
    return model.eval()


def _token_ids(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def prefill(setting: Setting, family: str, real: Options) -> Prepared:
    """One long prompt up to the logits of its last token."""
    model = _model(family, real, f"{family}ForCausalLM", setting)
    ids = _token_ids(model.config.vocab_size, 1, 48 if setting.tiny else 8192).to(setting.device)

    @torch.inference_mode()
    def run() -> Tensor:
        return model(input_ids=ids, logits_to_keep=1).logits  # type: ignore[no-any-return]  # a model's output

    return Prepared(run, lambda logits: {"logits": logits})


def generation(setting: Setting, prompts: list[int]) -> Prepared:
    """Greedy decoding behind left-padded prompts of these lengths."""
    model = _model("Qwen3", QWEN3_06B, "Qwen3ForCausalLM", setting)
    taken = [max(1, prompt // 32) for prompt in prompts] if setting.tiny else prompts
    new = 4 if setting.tiny else 48
    longest = max(taken)
    ids = _token_ids(model.config.vocab_size, len(taken), longest)
    mask = torch.arange(longest) >= longest - torch.tensor(taken)[:, None]
    inputs = {"input_ids": (ids * mask).to(setting.device), "attention_mask": mask.long().to(setting.device)}
    model.generation_config.eos_token_id = None
    options: Options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)

    def answer(_: Any) -> Answer:
        told = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
        return {"tokens": told.sequences[:, longest:], "margins": margins(torch.stack(told.logits, 1))}

    return Prepared(lambda: model.generate(**inputs, **options), answer, tokens=new * len(taken))


def _packed(taken: list[int], vocabulary: int, with_lengths: bool) -> dict[str, Any]:
    """As transformers' collator packs texts of these lengths."""
    from transformers import DataCollatorWithFlattening

    texts = _token_ids(vocabulary, sum(taken)).split(taken)
    features = [{"input_ids": text.tolist(), "labels": text.tolist()} for text in texts]
    batch: dict[str, Any] = DataCollatorWithFlattening(return_flash_attn_kwargs=with_lengths)(features)
    return batch


def _padded(batch: dict[str, Any], taken: list[int]) -> dict[str, Any]:
    """The same texts one below the other, for implementations that know no packing without causality."""
    mask = torch.arange(max(taken)) < torch.tensor(taken)[:, None]
    padded = {"attention_mask": mask.long()}
    for name, filler in (("input_ids", 0), ("labels", -100)):
        padded[name] = torch.full(mask.shape, filler).masked_scatter(mask, batch[name])
    return padded


def _onto(device: str, batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def encoder(setting: Setting, with_backward: bool) -> Prepared:
    """ModernBERT over 64 texts, packed by the collator; padded for SDPA and eager."""
    model = _model("ModernBert", MODERNBERT, "ModernBertForMaskedLM", setting)
    taken = lengths(96, 6) if setting.tiny else lengths(16384, 64)
    batch = _packed(taken, model.config.vocab_size, with_lengths=True)
    real = torch.ones(1, sum(taken), dtype=torch.bool)
    if not setting.implementation.is_flash:
        batch = _padded(batch, taken)
        real = batch["attention_mask"].bool()
    batch, real = _onto(setting.device, batch), real.to(setting.device)
    if with_backward:
        return _training_step(model, batch, model.model.layers[0].attn.Wqkv.weight)

    @torch.inference_mode()
    def run() -> Tensor:
        return model(**batch).logits  # type: ignore[no-any-return]  # a model's output

    return Prepared(run, lambda logits: {"logits": logits[real][::16, ::8]})


def decoder_step(setting: Setting, with_lengths: bool) -> Prepared:
    """Llama over 16k tokens of 16 texts, told apart by position_ids alone or by the collator's lengths as well.

    SDPA and eager build their mask from the position_ids.
    """
    model = _model("Llama", LLAMA, "LlamaForCausalLM", setting)
    taken = lengths(96, 4) if setting.tiny else lengths(16384, 16)
    batch = _packed(taken, model.config.vocab_size, with_lengths and setting.implementation.is_flash)
    return _training_step(model, _onto(setting.device, batch), model.model.layers[0].self_attn.q_proj.weight)


def _training_step(model: Any, batch: dict[str, Any], shown: Tensor) -> Prepared:
    """Forward and backward; the optimizer, which has no attention, is left out."""
    model.train()
    model.config.use_cache = False

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(**batch).loss
        (loss * _LOSS_SCALE).backward()
        return loss.detach()

    def answer(loss: Tensor) -> Answer:
        assert shown.grad is not None
        return {"loss": loss, "gradient": shown.grad / _LOSS_SCALE}

    return Prepared(run, answer)
