"""Batches as vLLM's model runner hands them to a backend: pages, tables, slots and lengths; and the right answers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
K_SCALE, V_SCALE = torch.tensor(0.03), torch.tensor(0.5)  # of 8-bit caches
LAYOUTS = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Batch:
    """sequences: (rows, keys) of each; the rows are its last ones. padding: tokens, and sequences, behind them."""

    sequences: tuple[tuple[int, int], ...] = ((1, 40), (1, 17), (33, 33), (20, 75))
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    page: int = 16
    layout: str = "NHD"
    dtype: torch.dtype = torch.float16
    window: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    causal: bool = True
    padding: tuple[int, int] = (0, 0)
    kv_cache_dtype: str = "auto"

    def build(self) -> Built:
        return Built(self)


class Built:
    """The tensors of a batch. Slots that no sequence uses hold NaN; the new keys are not in the cache yet."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        generator = torch.Generator().manual_seed(len(batch.sequences) + batch.head_dim)
        tokens, sequences = batch.padding
        rows = [rows for rows, _ in batch.sequences] + [0] * sequences
        keys = [keys for _, keys in batch.sequences] + [0] * sequences
        nheads, nheads_k = batch.heads

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(batch.dtype)

        total = sum(rows)
        self.query = draw(total + tokens, nheads, batch.head_dim)
        self.keys = [draw(n, nheads_k, batch.head_dim) for n in keys]
        self.values = [draw(n, nheads_k, batch.head_dim) for n in keys]
        self.new_keys = torch.cat(
            [k[len(k) - n :] for k, n in zip(self.keys, rows)] + [draw(tokens, nheads_k, batch.head_dim)]
        )
        self.new_values = torch.cat(
            [v[len(v) - n :] for v, n in zip(self.values, rows)] + [draw(tokens, nheads_k, batch.head_dim)]
        )
        self.slopes = [2.0 ** -(head + 1) for head in range(nheads)] if batch.alibi else None
        self.sinks = draw(nheads) if batch.sinks else None
        columns = -(-max(keys) // batch.page) + 1
        needed = [-(-n // batch.page) for n in keys]
        pages = torch.randperm(sum(needed) + 2, generator=generator).int() + 1  # page 0 is vLLM's null page
        self.table = torch.zeros(len(keys), columns, dtype=torch.int32)
        for sequence, count in enumerate(needed):
            self.table[sequence, :count], pages = pages[:count], pages[count:]
        shape = sum(needed) + 3, nheads_k, batch.page, 2 * batch.head_dim
        order = LAYOUTS[batch.layout]
        sizes = [shape[axis] for axis in order]
        if batch.kv_cache_dtype in EIGHT_BITS:
            memory = torch.full(sizes, 0x7F, dtype=torch.uint8)  # NaN in both formats
        else:
            memory = torch.full(sizes, torch.nan, dtype=batch.dtype)
        self.cache = memory.permute(*[order.index(axis) for axis in range(4)])
        slots = [self._slots(sequence, n) for sequence, n in enumerate(keys)]
        for place, k, v, n in zip(slots, self.keys, self.values, rows):
            old = len(k) - n
            self._write(place[:old], k[:old], v[:old])
        self.slots = torch.cat([place[len(place) - n :] for place, n in zip(slots, rows)])
        padded = total
        if tokens == sequences > 0:  # as in a graph: padding counts
            padded, self.slots = total + tokens, torch.cat([self.slots, torch.full((tokens,), -1)])
        starts = torch.tensor([0, *rows]).cumsum(0)
        self.common = dict(
            query_start_loc=starts.int(), query_start_loc_cpu=starts.int(), seq_lens=torch.tensor(keys).int(),
            num_reqs=len(rows), num_actual_tokens=padded, max_query_len=max(rows), max_seq_len=max(keys),
            block_table_tensor=self.table, slot_mapping=self.slots, causal=batch.causal,
        )  # fmt: skip
        self.starts = starts.tolist()

    def _slots(self, sequence: int, count: int) -> Tensor:
        places = torch.arange(count)
        return self.table[sequence].long()[places // self.batch.page] * self.batch.page + places % self.batch.page

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        k, v = self.cache.transpose(1, 2).split(self.batch.head_dim, -1)
        write_keys(keys, values, k, v, slots, self.batch.kv_cache_dtype, K_SCALE, V_SCALE)

    def impl(self, module: Any, **options: Any) -> Any:
        batch = self.batch
        given = dict(
            num_heads=batch.heads[0], head_size=batch.head_dim, scale=batch.head_dim**-0.5,
            num_kv_heads=batch.heads[1], alibi_slopes=self.slopes, sliding_window=batch.window,
            logits_soft_cap=batch.softcap or None, sinks=self.sinks, kv_cache_dtype=batch.kv_cache_dtype,
        )  # fmt: skip
        return module.CompatImpl(**given | options)

    def metadata(self, module: Any, threshold: int = 1, **changes: Any) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        return builder(module, threshold).build(0, CommonAttentionMetadata(**self.common | changes))

    def run(self, module: Any, threshold: int = 1, appends_in_launch: bool = False) -> Tensor:
        """Write the new keys and attend, as a layer does; returns the output, which starts as NaN.

        appends_in_launch: whether decode steps write their keys themselves, as after a warm-up with our kernels
        """
        impl, metadata, layer = (
            self.impl(module),
            self.metadata(module, threshold),
            SimpleNamespace(_k_scale=K_SCALE, _v_scale=V_SCALE),
        )
        output, impl.appends_in_launch = torch.full_like(self.query, torch.nan), appends_in_launch
        found = impl.forward(layer, self.query, self.new_keys, self.new_values, self.cache, metadata, output)
        assert found is output
        return output

    def answer(self, causal: bool | None = None) -> Tensor:
        """The rows' attention by the formula, in fp64."""
        causal = self.batch.causal if causal is None else causal
        found = [
            self._attend(self.query[start:end], k, v, causal)
            for start, end, k, v in zip(self.starts, self.starts[1:], self.keys, self.values)
        ]
        return torch.cat(found)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        batch, group = self.batch, self.batch.heads[0] // self.batch.heads[1]
        if batch.kv_cache_dtype in EIGHT_BITS:
            dtype = EIGHT_BITS[batch.kv_cache_dtype]
            k, v = (rounded(x, scale, dtype).double() * scale for x, scale in ((k, K_SCALE), (v, V_SCALE)))
        q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.mT * batch.head_dim**-0.5
        if batch.softcap:
            scores = batch.softcap * (scores / batch.softcap).tanh()
        ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
        if self.slopes is not None:
            scores = scores - torch.tensor(self.slopes).double()[:, None, None] * ahead.abs()
        hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
        if batch.window is not None:
            hidden = hidden | (ahead.abs() >= batch.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
            scores = torch.cat([scores, sink], -1)
            v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
        return (scores.softmax(-1) @ v).transpose(0, 1)


def builder(module: Any, threshold: int = 1, rswa_window: int | None = None) -> Any:
    """A metadata builder. threshold: the most rows of a decode step, more than 1 with speculative decoding"""
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    speculative = None
    if threshold > 1:
        speculative = SimpleNamespace(num_speculative_tokens=threshold - 1, parallel_drafting=False)
    model = SimpleNamespace(rswa_window=rswa_window)
    config = SimpleNamespace(
        model_config=model,
        speculative_config=speculative,
        parallel_config=parallel,
        num_speculative_tokens=threshold - 1,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    return module.CompatMetadataBuilder(SimpleNamespace(block_size=16), ["layer"], config, torch.device("cpu"))


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As vLLM's kernel rounds to 8 bits: the largest numbers at most."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def write_keys(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, dtype: str, k_scale: Any, v_scale: Any
) -> None:
    """As vLLM's kernel: tokens behind the slots, and those whose slot is -1, are not written."""
    slots = slots.long()
    kept = slots >= 0
    if dtype in EIGHT_BITS:
        key, value = (rounded(x, s, EIGHT_BITS[dtype]).view(torch.uint8) for x, s in ((key, k_scale), (value, v_scale)))
    page, slot = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
    k_cache[page, slot] = key[: len(slots)][kept]
    v_cache[page, slot] = value[: len(slots)][kept]
