"""A ComfyUI node that computes a model's attention by this package's kernels: copy this folder into custom_nodes.

`python main.py` under `flash-attn-compat run --sdpa` does the same for every model without a node (docs/recipes.md).
Use the node to choose model by model, or where ComfyUI was started with an attention of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, sdpa

# The keywords of ComfyUI's attention functions that change no answer here, and the two that attention() obeys.
KNOWN = {
    "transformer_options", "attn_precision", "low_precision_attention", "_inside_attn_wrapper", "scale", "enable_gqa",
}  # fmt: skip


def attention(
    func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, *args: Any,
    skip_reshape: bool = False, skip_output_reshape: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Return the result of ComfyUI's attention function ``func``, computed by our kernels where they serve.

    q, k, v: (batch, tokens, heads * head_dim), or (batch, heads, tokens, head_dim) with skip_reshape
    kwargs: scale is the softmax scale; with enable_gqa k and v may have fewer heads; any other keyword goes to ``func``
    """
    if mask is not None or args or kwargs.keys() - KNOWN or q.dtype not in (torch.float16, torch.bfloat16):
        with sdpa():  # masks run on our kernels too, if func is PyTorch's attention
            reshapes = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            return func(q, k, v, heads, mask, *args, **reshapes, **kwargs)
    head_dim = q.shape[-1] if skip_reshape else q.shape[-1] // heads
    parts = (x.transpose(1, 2) if skip_reshape else x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    out = flash_attn_func(*parts, softmax_scale=kwargs.get("scale"))
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


class FlashAttnCompat:
    """Takes a MODEL and returns it with our attention."""

    CATEGORY, FUNCTION, RETURN_TYPES = "model_patches", "patch", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any]:
        patched = model.clone()
        options = patched.model_options.get("transformer_options", {})
        patched.model_options["transformer_options"] = {**options, "optimized_attention_override": attention}
        return (patched,)


NODE_CLASS_MAPPINGS = {"FlashAttnCompat": FlashAttnCompat}
NODE_DISPLAY_NAME_MAPPINGS = {"FlashAttnCompat": "Attention by flash_attn_compat"}
