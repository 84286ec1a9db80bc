"""New keys and values into a cache, and rotated rows of q, by a kernel of its own: where the decode kernel cannot."""

from __future__ import annotations

from torch import Tensor

from flash_attn_compat.backends.fused import launcher, trial, variants
from flash_attn_compat.backends.fused.launches import Launches
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall

_THREADS, _PIECE = 128, 8


def add(launches: Launches, new: Append) -> None:
    """What writes ``new`` keys, and leaves q for later launches rotated where that is asked for.

    launches: of a call with the lengths before the append, if any; with the fields of the new keys
    """
    call, rotates, (batch, seqlen_new) = launches.call, new.rotary_cos is not None, new.k.shape[:2]
    rows = 2 * batch * seqlen_new * call.nheads_k + rotates * batch * call.nheads * call.q.shape[1]
    pieces = rows * -(-max(call.q.shape[-1], call.v.shape[-1]) // _PIECE)
    blocks = max(1, min(-(-pieces // _THREADS), 32 * launcher.processors(call.q.get_device())))
    strides = launcher.contiguous_strides(call.q.shape)
    launches.add(variants.append(_kind(call, new)), blocks, q_rotated_s=strides)
    if rotates:
        launches.leave("q_rotated", call.q.shape, call.q.dtype)
        launches.fields["q_s"], launches.instead["q"] = strides, ("q_rotated", 0)


def try_first(call: AttentionCall, new: Append) -> None:
    """Raises KernelError if the kernel turns out to be wrong."""
    kind, place = _kind(call, new), call.q.device

    def run_tiny(call: AttentionCall, new: Append) -> dict[str, Tensor]:
        launches = Launches(call, kind, launcher.described(call) | launcher.described_new(new))
        add(launches, new)
        made = launches.plan(new).run((*call.tensors, *new[:4]))
        return {"q": made.get("q_rotated", call.q)}

    def wrong() -> str | None:
        return trial.of_forward(kind, place, run_tiny, few_rows=True, appends=True)

    trial.check((variants.append(kind),), call.q.get_device(), wrong)


def _kind(call: AttentionCall, new: Append) -> Kind:
    read = call.q if new.rotary_cos is not None else None, call.k, call.v, *new[:4]
    return launcher.kind_of(call, launcher.vector_size(read, in_place=True))
