"""A call's forward: the forward kernel for tiles of rows, the decode kernel for few rows over many keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_compat import settings
from flash_attn_compat.backends.fused import append, grids, launcher, tensor_cores, trial, variants
from flash_attn_compat.backends.fused.launcher import Launch, Output, Plan
from flash_attn_compat.backends.fused.variants import Kind
from flash_attn_compat.engine import alignment, dropout
from flash_attn_compat.engine.append import Append, Step
from flash_attn_compat.engine.call import AttentionCall, Result

# Each block that sees new keys writes them all.
_MOST_NEW = 16


def forward(call: AttentionCall) -> Result:
    """One call; raises KernelError where a kernel cannot be used."""
    call = launcher.tidy(call)
    return launcher.planned("forward", lambda: make_plan(call), call)(call)


def make_plan(call: AttentionCall) -> Callable[[AttentionCall], Result]:
    vec = launcher.vector_size(call[:3], in_place=not call.is_dense and call.cu_seqlens_k is None)
    return _tried(call, vec).run if vec else _on_copies


def _on_copies(call: AttentionCall) -> Result:
    """What is not on 16 bytes is copied into place first."""
    q, k, v = map(launcher.aligned, call[:3])
    result = forward(call._replace(q=q, k=k, v=v))
    return result._replace(out=alignment.narrowed(result.out, call.head_dim_v))


def make_step(call: AttentionCall, new: Append | None) -> Step | None:
    """How all calls over a cache like ``call`` are computed; None where no kernel can read the cache as it lies.

    call: one of them; where their lengths are ints it speaks of all the cache's slots
    """
    few = variants.takes_decode(launcher.longest_rows(call), call.nheads // call.nheads_k, False)
    as_given = launcher.tidy(call) is call and launcher.is_readable(call.q) and (new is None or launcher.is_tidy(new))
    if not as_given:
        slopes, table = _contiguous(call.alibi_slopes), _contiguous(call.block_table)
        call = call._replace(q=call.q.contiguous(), alibi_slopes=slopes, block_table=table)
        new = None if new is None else Append._make(map(_contiguous, new))
    read_at_once = new[:4] if new is not None and few and new.k.shape[1] <= _MOST_NEW else ()
    vec = launcher.vector_size((*call[:3], *read_at_once), in_place=few or not call.is_dense)
    if not vec:
        return None
    attention = _tried(call, vec, new)
    return attention.step if as_given else attention.step_on_copies


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _tried(call: AttentionCall, vec: int, new: Append | None = None) -> Attention:
    """Raises KernelError where a kernel turns out to be wrong."""
    tensor_cores.hint(call.q.get_device(), settings.gpu(call.q.device))
    attention = Attention(call, launcher.kind_of(call, vec), new)
    attention.try_first()
    if new is not None and attention.writes_first:
        append.try_first(call, new)
    return attention


class Attention:
    """A launch of the forward or the decode kernel; the latter writes a few ``new`` keys on its way.

    More of them, or those of more rows, are written by a launch before it.
    splits: blocks that share the keys of a tile of rows, None: as many as pay; in_seats: as shares in grids.py
    """

    def __init__(
        self,
        call: AttentionCall,
        kind: Kind,
        new: Append | None = None,
        splits: int | None = None,
        in_seats: bool = False,
    ) -> None:
        rows, group = launcher.longest_rows(call), call.nheads // call.nheads_k
        self.kind, self.is_decode = kind, variants.takes_decode(rows, group, kind.dropout)
        self.appends, self.seqlen_new = new is not None, 0 if new is None else new.k.shape[1]
        self.writes_first = self.appends and not (self.is_decode and self.seqlen_new <= _MOST_NEW)
        fields = launcher.described(call) | {"out_s": launcher.contiguous_strides(call.out_shape)}
        outputs: list[Output] = []
        launches: list[Launch] = []
        if new is not None:
            fields |= launcher.described_new(new)
            if self.writes_first:
                outputs, first = append.launch(call, new, fields)
                launches.append(first)
        if outputs:
            fields["q_s"] = launcher.contiguous_strides(call.q.shape)
        outputs.append(Output("out", call.out_shape, call.q.dtype))
        self.needs_grad = call.needs_grad
        if call.return_lse or call.needs_grad:
            outputs.append(Output("lse", call.lse_shape, torch.float32))
        if call.needs_grad and call.lse_carries_alibi_position:
            outputs.append(Output("lse_true", call.lse_shape, torch.float32))
        # The decode kernel scales what it converts step by step.
        self.has_maxima = not self.is_decode and kind.type == variants.BF16_AS_FP16
        if self.has_maxima:
            found, before = launcher.maxima(call, kind, fields)
            outputs.append(found)
            launches.append(before)
        is_packed = call.cu_seqlens_q is not None
        if self.is_decode:  # the heads of a group are rows of one tile
            variant = variants.step(kind) if self.appends and not self.writes_first else variants.decode(kind)
            heads, grid = call.nheads_k, grids.apart(rows * group, variant.rows, call.batch, is_packed)
        else:
            variant, heads, tokens = variants.forward(kind), call.nheads, call.q.shape[0] if is_packed else None
            grid = grids.grid(rows, variant.rows, call.batch, heads, tokens, shares=in_seats)
        total = grid.tiles * heads * call.batch
        if grid.seats:
            variant, splits = variants.in_seats(variant), 1
        elif splits is None:
            splits = launcher.splits_of(call, variant, total)
        workspace = launcher.PARTS_AT + total * splits * variants.part_bytes(variant) if splits > 1 else 0
        fields |= {"tiles": grid.tiles, "splits": splits, "seats": grid.seats}
        launches.append(Launch(variant, splits * grid.tiles * heads * grid.slabs, fields))
        self.plan = Plan(call, outputs, launches, new, workspace=workspace)

    def try_first(self) -> None:
        """Raises KernelError if the kernel turns out to be wrong."""
        kind, plan, appends = self.kind, self.plan, self.appends and not self.writes_first
        in_seats = variants.is_in_seats(plan.variants[-1])

        def run_tiny(call: AttentionCall, new: Append | None) -> dict[str, Tensor]:
            result = Attention(call, kind, new, splits=2, in_seats=in_seats).run(call, new)
            return {"out": result.out, "softmax_lse": result.lse}

        def wrong() -> str | None:
            return trial.of_forward(kind, plan.place, run_tiny, self.is_decode, appends)

        trial.check(plan.variants[-1:], plan.device, wrong)

    def run(self, call: AttentionCall, new: Append | None = None) -> Result:
        rng_state = call.rng_state
        if rng_state is None and call.dropout_p:
            rng_state = dropout.new_rng_state(self.plan.place)
        return self._result(self.plan.run(launcher.tensors_of(call, rng_state, new)), rng_state)

    def step(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotary_cos: Tensor | None,
        rotary_sin: Tensor | None,
        cache_seqlens: int | Tensor | None,
        batch_idx: Tensor | None,
        leftpad: Tensor | None,
        table: Tensor | None,
        slopes: Tensor | None,
    ) -> Result:
        """As Step of engine/append.py."""
        used, seqlen_k = cache_seqlens, None
        if isinstance(cache_seqlens, int):
            used, seqlen_k = None, cache_seqlens + self.seqlen_new
        pages = table if batch_idx is None else batch_idx
        tensors = q, k_cache, v_cache, slopes, None, None, used, leftpad, pages, None, k, v, rotary_cos, rotary_sin
        result = self._result(self.plan.run(tensors, seqlen_k), None)
        if self.appends:
            launcher.note_written(k_cache, v_cache)
        return result

    def step_on_copies(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any) -> Result:
        """The same for what is not laid out as kernels read it: contiguous copies of all but the cache."""
        return self.step(_contiguous(q), k_cache, v_cache, *map(_contiguous, others))

    def _result(self, made: dict[str, Tensor], rng_state: Tensor | None) -> Result:
        out, lse = made["out"], made.get("lse")
        if not self.needs_grad:
            return Result(out, lse, rng_state)
        # The backward takes the true LSE first, then the maxima.
        true_lse, maxima = made.get("lse_true"), made.get("absmax")
        if maxima is not None:
            return Result(out, lse, rng_state, (lse if true_lse is None else true_lse, maxima))
        return Result(out, lse, rng_state, () if true_lse is None else (true_lse,))
