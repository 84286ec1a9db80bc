"""An attention problem: a description by small numbers (`Problem`), and its tensors.

The repr of a `Problem` rebuilds it, so the report of a failure is the line that repeats it. The CPU draws the tensors,
so their values are the same on every device. Every tensor comes with a map of its tokens: the sequence that reads each
token, or -1 if the call must not read it. Problem's sizes, stray and poison are put into the tensors by this map.
oracle.py computes the right answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .call import DTYPES, EIGHT_BITS, Call

FUNCTIONS = {
    "dense": "flash_attn_func",
    "kvpacked": "flash_attn_kvpacked_func",
    "qkvpacked": "flash_attn_qkvpacked_func",
    "varlen": "flash_attn_varlen_func",
    "varlen_kvpacked": "flash_attn_varlen_kvpacked_func",
    "varlen_qkvpacked": "flash_attn_varlen_qkvpacked_func",
    "paged": "flash_attn_varlen_func",
    "private_varlen": "_flash_attn_varlen_forward",
    "kvcache": "flash_attn_with_kvcache",
}
QUANTITIES = ("q", "k", "v", "dout")  # the order of the numbers in Problem.sizes
KINDS = tuple(FUNCTIONS)
WITH_GRADIENTS = frozenset(KINDS) - {"paged", "private_varlen", "kvcache"}


@dataclass(frozen=True, repr=False)
class Problem:
    """A call described by small numbers. For a cache `seqlens_k` is `cache_seqlens`, before the append."""

    kind: str = "dense"
    seqlens_q: tuple[int, ...] = (4,)
    seqlens_k: tuple[int, ...] = (4,)
    nheads_k: int = 1
    group: int = 1
    head_dim: int = 8
    head_dim_v: int | None = None
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    window_as: str = "tuple"
    softcap: float = 0.0
    alibi: str = ""
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4  # of q, k, v, dout in memory; packed tensors: q's
    magnitude: float = 1.0  # a factor of q and k
    value_mean: float = 0.0
    deterministic: bool = False
    return_attn_probs: bool = True
    gap: tuple[int, int] = (0, 0)  # tokens before the first and after the last sequence
    max_seqlen_slack: int = 0
    max_seqlen_as: str = "int"
    page_size: int = 0
    leftpad: tuple[int, ...] | None = None
    seqused: tuple[int, ...] | None = None
    capacity: int = 0
    new_keys: int | None = None
    lengths_as: str = "tensor"
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    batch_idx: bool = False
    num_splits: int = 0
    eight_bit: str = ""  # "e4m3" or "e5m2": the cache, or the pages, are 8-bit floats
    descale: str = "number"  # of an 8-bit cache: "number", or a tensor for its "heads" or "sequences"
    poison: str = ""  # "nan" or "inf" in all memory that the call must not read
    # Factors of (q, k, v, dout): each (sequence, key head) takes the next entry, in a cycle.
    sizes: tuple[tuple[float, float, float, float], ...] = ()
    stray: tuple[str, int, str] | None = None  # ("v", 2, "nan"): one NaN or infinity in sequence 2's v
    backward: bool = True
    seed: int = 0

    def __repr__(self) -> str:
        """Show only the fields that differ from their defaults: a line to read and paste."""
        said = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Problem({', '.join(said)})"

    @property
    def nheads(self) -> int:
        return self.nheads_k * self.group

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def scores(self) -> int:
        return self.nheads * sum(q * k for q, k in zip(self.seqlens_q, self.seqlens_k))

    @property
    def has_gradients(self) -> bool:
        return self.backward and self.kind in WITH_GRADIENTS

    def build(self, device: torch.device | str = "cpu", drawn_there: bool = False) -> Call:
        """Return the call. Its tensors are drawn on the CPU, the same for every device, unless `drawn_there`."""
        call = _Builder(self, device if drawn_there else "cpu").call()
        if not drawn_there:
            return call if torch.device(device).type == "cpu" else call.to(device)
        return replace(call, args={n: x.to(device) if isinstance(x, Tensor) else x for n, x in call.args.items()})


class _Builder:
    def __init__(self, problem: Problem, device: torch.device | str) -> None:
        self.p = problem
        self.dtype = DTYPES[problem.dtype]
        self.device = device
        self.generator = torch.Generator(device).manual_seed(problem.seed)

    def call(self) -> Call:
        p = self.p
        parts = {"kvcache": self.cache, "private_varlen": self.varlen}
        args = parts.get(p.kind, self.varlen if "varlen" in p.kind or p.kind == "paged" else self.dense)()
        args |= self.options() | (self.descales() if p.eight_bit else {})
        dout = None
        if p.has_gradients:
            tokens = args["q"].shape[:-2] if "q" in args else args["qkv"].shape[:-3]
            readers = self.token_readers(p.seqlens_q) if "varlen" in p.kind else self.row_readers(tokens[1])
            dout = self.tensor(("dout",), readers, p.value_dim, p.layouts[3])
        return Call(FUNCTIONS[p.kind], args, dout)

    # ---------------------------------------------------------------- values

    def tensor(self, parts: tuple[str, ...], readers: Tensor, dim: int, layout: str = "contiguous") -> Tensor:
        """Draw a tensor (*readers.shape, [parts,] heads, dim). parts: one of QUANTITIES, or several to pack"""
        p = self.p
        heads = p.nheads if parts[0] in ("q", "dout") else p.nheads_k
        shape = (*readers.shape, len(parts), heads, dim)
        values = torch.randn(shape, generator=self.generator, device=self.device)
        for index, part in enumerate(parts):
            mine = values[..., index, :, :]
            if part in ("q", "k"):
                mine *= p.magnitude
            if p.value_mean and part == "v":
                mine += p.value_mean
            if p.sizes:
                largest = min(torch.finfo(self.dtype).max, torch.finfo(values.dtype).max)
                mine *= self.factors(part)[readers][..., None]
                mine.clamp_(-largest, largest)
            if p.stray is not None and p.stray[0] == part:
                self.put_stray(mine, readers)
        if p.poison:
            values[readers < 0] = float(p.poison)
        return laid_out((values if len(parts) > 1 else values[..., 0, :, :]).to(self.dtype), layout)

    def factors(self, quantity: str) -> Tensor:
        """Return Problem.sizes as factors (sequences + 1, heads). The last row, of 1, is for tokens of no sequence."""
        p = self.p
        batch, which = len(p.seqlens_q), QUANTITIES.index(quantity)
        chosen = [p.sizes[i % len(p.sizes)][which] for i in range(batch * p.nheads_k)]
        factors = torch.tensor(chosen).view(batch, p.nheads_k)
        if quantity in ("q", "dout"):
            factors = factors.repeat_interleave(p.group, 1)
        return torch.cat([factors, torch.ones(1, factors.shape[1])])

    def put_stray(self, values: Tensor, readers: Tensor) -> None:
        """Put one NaN or infinity into a token, head and channel of the named sequence."""
        assert self.p.stray is not None
        _, sequence, number = self.p.stray
        tokens = (readers == sequence).nonzero().tolist()
        if tokens and values.shape[-1]:
            seed = self.p.seed
            heads = values[tuple(tokens[seed % len(tokens)])]
            heads[seed % values.shape[-2], seed % values.shape[-1]] = float(number)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    def shuffled(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator, device=self.device)

    # ---------------------------------------------------------------- the reader of a token

    def row_readers(self, length: int) -> Tensor:
        batch = len(self.p.seqlens_q)
        return torch.arange(batch)[:, None].expand(batch, length)

    def token_readers(self, lengths: Sequence[int]) -> Tensor:
        before, after = self.p.gap
        sequences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return torch.cat([sequences.new_full((before,), -1), sequences, sequences.new_full((after,), -1)])

    # ---------------------------------------------------------------- arguments

    def options(self) -> dict[str, Any]:
        p = self.p
        args: dict[str, Any] = {"causal": p.causal, "softmax_scale": p.softmax_scale, "softcap": p.softcap}
        if p.alibi:
            shape = (len(p.seqlens_q), p.nheads) if p.alibi == "bh" else (p.nheads,)
            args["alibi_slopes"] = torch.rand(shape, generator=self.generator, device=self.device) - 0.2
        if p.alibi == "powers":  # the slopes of the ALiBi paper
            args["alibi_slopes"] = 2.0 ** (-8.0 * torch.arange(1, p.nheads + 1) / p.nheads)
        if p.kind == "private_varlen":
            args["window_size_left"], args["window_size_right"] = p.window
            args["softmax_scale"] = p.head_dim**-0.5 if p.softmax_scale is None else p.softmax_scale
            return args | {"dropout_p": p.dropout_p, "return_softmax": p.dropout_p > 0}
        ways: dict[str, Callable[[], Any]] = {
            "tuple": lambda: p.window,
            "list": lambda: list(p.window),
            "tensor": lambda: torch.tensor(p.window),
            "scalars": lambda: tuple(torch.tensor(side) for side in p.window),
        }
        args["window_size"] = ways[p.window_as]()
        if p.kind == "kvcache":
            return args | {"num_splits": p.num_splits, "return_softmax_lse": p.return_attn_probs}
        return args | {
            "dropout_p": p.dropout_p, "deterministic": p.deterministic, "return_attn_probs": p.return_attn_probs,
        }  # fmt: skip

    def descales(self) -> dict[str, Any]:
        p = self.p
        if p.descale == "number":
            return {"k_descale": 0.75, "v_descale": 1.5}
        rows, heads = (len(p.seqlens_q), 1) if p.descale == "sequences" else (1, p.nheads_k)
        numbers = torch.rand(2, rows, heads, generator=self.generator, device=self.device) + 0.5
        return {"k_descale": numbers[0], "v_descale": numbers[1]}

    def attention_inputs(self, readers_q: Tensor, readers_k: Tensor) -> dict[str, Tensor]:
        p = self.p
        if p.kind.endswith("qkvpacked"):
            return {"qkv": self.tensor(("q", "k", "v"), readers_q, p.head_dim, p.layouts[0])}
        q = self.tensor(("q",), readers_q, p.head_dim, p.layouts[0])
        if p.kind.endswith("kvpacked"):
            return {"q": q, "kv": self.tensor(("k", "v"), readers_k, p.head_dim, p.layouts[1])}
        return {"q": q} | dict(zip("kv", self.keys_and_values(readers_k)))

    def keys_and_values(self, readers: Tensor) -> tuple[Tensor, Tensor]:
        p = self.p
        k = self.tensor(("k",), readers, p.head_dim, p.layouts[1])
        v = self.tensor(("v",), readers, p.value_dim, p.layouts[2])
        return (in_eight_bits(k, p.eight_bit), in_eight_bits(v, p.eight_bit)) if p.eight_bit else (k, v)

    def dense(self) -> dict[str, Any]:
        return dict(self.attention_inputs(*map(self.row_readers, (self.p.seqlens_q[0], self.p.seqlens_k[0]))))

    def varlen(self) -> dict[str, Any]:
        p = self.p
        cu_q, cu_k = (self.cumulative(lengths, p.gap[0]) for lengths in (p.seqlens_q, p.seqlens_k))
        readers_q, readers_k = map(self.token_readers, (p.seqlens_q, p.seqlens_k))
        args: dict[str, Any] = {}
        if p.page_size:
            args["q"] = self.tensor(("q",), readers_q, p.head_dim, p.layouts[0])
            lengths = p.seqlens_k if p.seqused is None else p.seqused
            args["block_table"], args["k"], args["v"] = self.pages(lengths)
        else:
            for b, start in enumerate(cu_k.tolist()[:-1]):
                used = p.seqlens_k[b] if p.seqused is None else p.seqused[b]
                readers_k[start : start + (0 if p.leftpad is None else p.leftpad[b])] = -1
                readers_k[start + used : start + p.seqlens_k[b]] = -1
            args |= self.attention_inputs(readers_q, readers_k)
        longest_q, longest_k = (max(x, default=0) + p.max_seqlen_slack for x in (p.seqlens_q, p.seqlens_k))
        if p.max_seqlen_as == "tensor":
            longest_q, longest_k = torch.tensor(longest_q), torch.tensor(longest_k)  # type: ignore[assignment]  # as callers do
        if p.kind == "varlen_qkvpacked":
            return args | {"cu_seqlens": cu_q, "max_seqlen": longest_q}
        if p.kind == "private_varlen":
            longest_q, longest_k = int(longest_q), int(longest_k)
            if p.seqused is not None:
                args["seqused_k"] = self.ints(p.seqused)
            if p.leftpad is not None:
                args["leftpad_k"] = self.ints(p.leftpad)
        return args | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}

    def cumulative(self, lengths: Sequence[int], start: int) -> Tensor:
        return self.ints(torch.tensor([start, *lengths]).cumsum(0).tolist())

    def pages(self, lengths: Sequence[int], reserve: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return (block_table, k, v): pages in random order; the table has garbage after a sequence's last page."""
        p = self.p
        columns = [-(-(length + reserve) // p.page_size) for length in lengths]
        width = max(1, *columns, -(-p.capacity // p.page_size))
        blocks = sum(columns) + 2
        order = self.shuffled(blocks).tolist()
        table = torch.full((len(lengths), width), 10**6 if p.poison else 0, dtype=torch.int32)
        readers = torch.full((blocks, p.page_size), -1)
        for b, (n, length) in enumerate(zip(columns, lengths)):
            for column in range(n):
                table[b, column] = page = order.pop()
                readers[page, : max(0, length - column * p.page_size)] = b
        return table, *self.keys_and_values(readers)

    def cache(self) -> dict[str, Any]:
        p = self.p
        new = p.new_keys or 0
        rows = self.row_readers(p.seqlens_q[0])
        args: dict[str, Any] = {"q": self.tensor(("q",), rows, p.head_dim, p.layouts[0])}
        capacity = p.capacity
        if p.page_size:
            args["block_table"], args["k_cache"], args["v_cache"] = self.pages(p.seqlens_k, reserve=new)
            capacity = args["block_table"].shape[1] * p.page_size
        else:
            args |= self.contiguous_cache()
        if p.lengths_as != "none":
            args["cache_seqlens"] = p.seqlens_k[0] if p.lengths_as == "int" else self.ints(p.seqlens_k)
        if p.leftpad is not None:
            args["cache_leftpad"] = self.ints(p.leftpad)
        if p.new_keys is not None:
            args["k"] = self.tensor(("k",), self.row_readers(new), p.head_dim, p.layouts[0])
            args["v"] = self.tensor(("v",), self.row_readers(new), p.value_dim, p.layouts[0])
        if p.rotary_dim:
            table = max(capacity, max(p.seqlens_k) + max(p.seqlens_q[0], new))
            angles = torch.rand(table, p.rotary_dim // 2, generator=self.generator, device=self.device) * 6.3
            args["rotary_cos"], args["rotary_sin"] = (t.to(self.dtype) for t in (angles.cos(), angles.sin()))
            args["rotary_interleaved"] = p.rotary_interleaved
        return args

    def contiguous_cache(self) -> dict[str, Tensor]:
        p = self.p
        batch = len(p.seqlens_q)
        rows = batch + 2 if p.batch_idx else batch
        order = self.shuffled(rows)[:batch] if p.batch_idx else torch.arange(batch)
        readers = torch.full((rows, p.capacity), -1)
        for b, row in enumerate(order.tolist()):
            readers[row, 0 if p.leftpad is None else p.leftpad[b] : p.seqlens_k[b]] = b
        k, v = self.keys_and_values(readers)
        args = {"k_cache": k, "v_cache": v}
        return args | {"cache_batch_idx": self.ints(order.tolist())} if p.batch_idx else args


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a view equal to x (..., heads, dim) with another memory layout. Memory between its values holds NaN."""
    return _LAYOUTS[layout](x)


def in_eight_bits(x: Tensor, name: str) -> Tensor:
    """Return x as 8-bit floats in the same memory layout; finite numbers beyond the largest become the largest."""
    dtype = EIGHT_BITS[name]
    largest = torch.finfo(dtype).max
    memory = x.new_empty(0).set_(x.untyped_storage()).float()
    memory = torch.where(memory.isfinite(), memory.clamp(-largest, largest), memory)
    return memory.to(dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """Add columns of NaN before and after the last dimension."""
    return torch.nn.functional.pad(x, (before, after), value=torch.nan)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "sliced": lambda x: torch.stack([torch.full_like(x, torch.nan), x], -3)[
        ..., 1, :, :
    ],  # a view into a packed tensor, whose other part is NaN
    "heads_first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "wide_rows": lambda x: _padded(x, 0, 3)[..., :-3],
    "offset": lambda x: _padded(x.flatten(), 1, 0)[1:].view(x.shape),  # an unaligned pointer
    "strided_dim": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "one_head": lambda x: x[..., :1, :].expand(x.shape),
    "one_value": lambda x: (x.flatten()[:1] if x.numel() else x.new_ones(1)).view((1,) * x.dim()).expand(x.shape),
}
