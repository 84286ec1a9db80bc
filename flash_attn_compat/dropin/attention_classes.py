"""Attention classes for models of transformers that look theirs up in a dict of their own, not in the registry.

A class is put into its model's dict once transformers has imported the model. Needs torch, as attention_function does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.dropin.attention_function import attention
from flash_attn_compat.dropin.undo import Handler, when_imported

Maker = Callable[[ModuleType, MutableMapping[str, Any], str], Any]
_POSITIONS = torch.int16  # marks a mask that tells where packed sequences start: see flash_attention_mask
_watching = ExitStack()  # never closed, since a name in transformers' registry cannot be removed either


def register(name: str) -> None:
    """Let attn_implementation=`name` build every model of OWN_CLASSES, imported already or later."""
    handlers: dict[str, Handler] = {}
    for model in OWN_CLASSES:
        handlers[f"transformers.models.{model.folder}.modeling_{model.file}"] = functools.partial(_add, model, name)
    when_imported(handlers, _watching)


def _add(model: OwnClasses, name: str, module: ModuleType, undo: ExitStack) -> None:
    classes = getattr(module, model.table, None)
    if classes is not None and name not in classes:  # None: this transformers uses the registry
        classes[name] = model.make(module, classes, name)


def _over_scores(
    options: Callable[[Any], dict[str, Any]], module: ModuleType, classes: MutableMapping[str, Any], name: str
) -> Any:
    """Return our subclass of the eager class of GPT-J, GPT-Neo or Bark: its method _attn calls `attention`.

    options: returns the keyword arguments of `attention` for a layer
    """
    eager: Any = classes["eager"]

    class ServedAttention(eager):  # type: ignore[misc]  # transformers has no types
        _position_ids: Tensor | None = None

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self._position_ids = kwargs.get("position_ids")
            try:
                return super().forward(*args, **kwargs)
            finally:
                self._position_ids = None

        def _attn(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, head_mask: Any = None
        ) -> tuple[Tensor, None]:
            if head_mask is not None:
                raise NotImplementedError(f"head_mask is not served by {name!r}: pass attn_implementation='eager'")
            positions = self._position_ids
            if attention_mask is not None and attention_mask.dtype == _POSITIONS:
                attention_mask, positions = None, attention_mask
            out, weights = attention(
                self, query, key, value, attention_mask, dropout=self.attn_dropout.p if self.training else 0.0,
                position_ids=positions, **options(self),
            )  # fmt: skip
            return out.transpose(1, 2), weights

    ServedAttention.__name__ = ServedAttention.__qualname__ = f"{eager.__name__}By{name.title().replace('_', '')}"
    return ServedAttention


def _falcon(module: ModuleType, classes: MutableMapping[str, Any], name: str) -> Any:
    """Return our subclass of Falcon's eager class: its forward calls `attention`."""
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        return _refused("transformers 5 or later is needed", module, classes, name)
    eager: Any = classes["eager"]

    class FalconServedAttention(eager):  # type: ignore[misc]  # transformers has no types
        def forward(
            self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Tensor | None,
            position_ids: Tensor | None = None, layer_past: Any = None, use_cache: bool = False,
            output_attentions: bool = False, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any,
        ) -> tuple[Tensor, None]:  # fmt: skip
            if alibi is not None:
                raise NotImplementedError(
                    f"Falcon with alibi=True is not served by {name!r}: pass attn_implementation='sdpa' or 'eager'"
                )
            q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
            q, k = module.apply_rotary_pos_emb(q, k, *(position_embeddings or ()))
            if layer_past is not None:
                k, v = layer_past.update(k, v, self.layer_idx)
            dropout = self.config.attention_dropout if self.training else 0.0
            out, weights = attention(self, q, k, v, attention_mask, dropout=dropout, position_ids=position_ids)
            return self.dense(out.flatten(2)), weights

    return FalconServedAttention


def _own_sdpa(module: ModuleType, classes: MutableMapping[str, Any], name: str) -> Any:
    """Return a function that builds the model's own SDPA layer, and warns that our attention does not serve it."""

    @functools.wraps(classes["sdpa"], updated=())
    def build(*args: Any, **kwargs: Any) -> torch.nn.Module:
        own: torch.nn.Module = classes["sdpa"](*args, **kwargs)
        warnings.warn(
            f"{type(own).__name__} is not served by {name!r}: it adds relative positions to the scores, so the model "
            "computes this part with its own class for attn_implementation='sdpa'",
            stacklevel=2,
        )
        return own

    return build


def _refused(reason: str, module: ModuleType, classes: MutableMapping[str, Any], name: str) -> Any:
    """Return a stand-in for an attention class: a function that raises NotImplementedError and says what to pass."""
    others = " or ".join(repr(other) for other in reversed(list(classes)) if other != "flash_attention_2")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{module.__name__} is not served by {name!r}: {reason}. Pass attn_implementation={others}"
        )

    return refuse


def flash_attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return transformers' own mask for flash attention: (batch, seqlen_k), or None without padding.

    GPT-Neo's layers get no position_ids, which tell where packed sequences start. For one row of packed sequences,
    GPT-Neo therefore gets an int16 tensor (1, seqlen) instead of None: 0 at the first token of each sequence, else 1.
    """
    # Imported from the submodule: torch.compile up to PyTorch 2.11 cannot trace an import from the lazy transformers.
    from transformers.masking_utils import causal_mask_function
    from transformers.masking_utils import flash_attention_mask as transformers_mask

    mask: Tensor | None = transformers_mask(*args, **kwargs)
    sees, length = kwargs.get("mask_function"), kwargs.get("q_length", 0)
    may_be_packed = mask is None and kwargs.get("batch_size") == 1 and length == kwargs.get("kv_length")
    is_neo = getattr(kwargs.get("config"), "model_type", None) == "gpt_neo"
    if not (is_neo and may_be_packed) or sees is None or sees is causal_mask_function:
        return mask
    tokens = torch.arange(length, device=kwargs.get("device"))
    zero = torch.zeros_like(tokens)
    continues: Tensor = sees(zero, zero, tokens, (tokens - 1).clamp(min=0)) & (tokens > 0)
    return continues.to(_POSITIONS)[None]


class OwnClasses(NamedTuple):
    """A model of transformers that looks its attention class up in a dict of its own.

    folder, file: where transformers defines the model; table: the dict's name; make: makes our class for the dict
    """

    folder: str
    file: str
    table: str
    make: Maker


def _neo_options(layer: Any) -> dict[str, Any]:
    return {"scaling": 1.0, "sliding_window": layer.config.window_size if layer.attention_type == "local" else None}


_no_flash = functools.partial(_refused, "it has no attention class for flash attention")
OWN_CLASSES = (
    OwnClasses("falcon", "falcon", "FALCON_ATTENTION_CLASSES", _falcon),
    OwnClasses("gptj", "gptj", "GPTJ_ATTENTION_CLASSES", functools.partial(_over_scores, lambda layer: {})),
    OwnClasses("gpt_neo", "gpt_neo", "GPT_NEO_ATTENTION_CLASSES", functools.partial(_over_scores, _neo_options)),
    OwnClasses("bark", "bark", "BARK_ATTENTION_CLASSES", functools.partial(_over_scores, lambda layer: {})),
    OwnClasses("sam", "sam", "SAM_VISION_ATTENTION_CLASSES", _own_sdpa),
    OwnClasses("sam_hq", "sam_hq", "SAM_HQ_VISION_ATTENTION_CLASSES", _own_sdpa),
    OwnClasses("unlimited_ocr", "unlimited_ocr", "UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES", _own_sdpa),
    OwnClasses("deepseek_ocr2", "deepseek_ocr2", "DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES", _own_sdpa),
    OwnClasses("data2vec", "data2vec_vision", "DATA2VEC_VISION_SELF_ATTENTION_CLASSES", _own_sdpa),
    OwnClasses("git", "git", "GIT_SELF_ATTENTION_CLASSES", _no_flash),
    OwnClasses("superglue", "superglue", "SUPERGLUE_SELF_ATTENTION_CLASSES", _no_flash),
)
