"""Random attention problems: one description (`Problem`) and one generator, fed by a seed or by hypothesis.

A `Problem` is a value whose repr rebuilds it, so a failure is reported as the line that repeats it. What is
right about an answer stays out: see oracle.py and judge.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
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
KINDS = tuple(FUNCTIONS)
WITH_GRADIENTS = frozenset(KINDS) - {"paged", "private_varlen", "kvcache"}


@dataclass(frozen=True)
class Call:
    """A problem as tensors: `fn` by name, every argument by name, and the gradient to send back."""

    fn: str
    args: dict[str, Any]
    dout: Tensor | None


@dataclass(frozen=True, repr=False)
class Problem:
    """A whole call described by small numbers. For a cache `seqlens_k` is `cache_seqlens`, before the append."""

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
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4  # q, k, v, dout; a packed tensor has q's
    magnitude: float = 1.0
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
    poison: bool = False  # NaN in whatever the call must not read
    seed: int = 0

    def __repr__(self) -> str:
        """Only what differs from the defaults, so that a failure is a line one can read and paste."""
        said = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Problem({', '.join(said)})"

    @property
    def nheads(self) -> int:
        return self.nheads_k * self.group

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def has_gradients(self) -> bool:
        return self.kind in WITH_GRADIENTS

    def build(self, device: torch.device | str = "cpu") -> Call:
        """The same tensors every time, whatever the device: the values are drawn on the CPU."""
        return _Builder(self, torch.device(device)).call()


class _Builder:
    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.p, self.device = problem, device
        self.dtype = DTYPES[problem.dtype]
        self.generator = torch.Generator().manual_seed(problem.seed)

    def call(self) -> Call:
        p = self.p
        parts = {"kvcache": self.cache, "private_varlen": self.varlen}
        args = parts.get(p.kind, self.varlen if "varlen" in p.kind or p.kind == "paged" else self.dense)()
        args |= self.options()
        dout = None
        if p.has_gradients:
            tokens = args["q"].shape[:-2] if "q" in args else args["qkv"].shape[:-3]
            dout = self.tensor((*tokens, p.nheads, p.value_dim), p.layouts[3])
            if "varlen" in p.kind:
                self.poison_gap(dout)
        return Call(FUNCTIONS[p.kind], args, dout)

    # ---------------------------------------------------------------- values

    def tensor(self, shape: tuple[int, ...], layout: str = "contiguous", magnitude: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator) * magnitude
        return laid_out(values.to(self.dtype).to(self.device), layout)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32).to(self.device)

    def shuffled(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def poison_gap(self, x: Tensor) -> None:
        if self.p.poison and x.numel():
            before, after = self.p.gap
            x[:before] = torch.nan
            x[x.shape[0] - after :] = torch.nan

    # ---------------------------------------------------------------- arguments

    def options(self) -> dict[str, Any]:
        p = self.p
        args: dict[str, Any] = {"causal": p.causal, "softmax_scale": p.softmax_scale, "softcap": p.softcap}
        if p.alibi:
            shape = (p.nheads,) if p.alibi == "h" else (len(p.seqlens_q), p.nheads)
            args["alibi_slopes"] = (torch.rand(shape, generator=self.generator) - 0.2).to(self.device)
        if p.kind == "private_varlen":
            args["window_size_left"], args["window_size_right"] = p.window
            args["softmax_scale"] = p.head_dim**-0.5 if p.softmax_scale is None else p.softmax_scale
            return args | {"dropout_p": p.dropout_p, "return_softmax": p.dropout_p > 0}
        args["window_size"] = {
            "tuple": lambda: p.window,
            "list": lambda: list(p.window),
            "tensor": lambda: torch.tensor(p.window),
            "scalars": lambda: tuple(torch.tensor(side) for side in p.window),
        }[p.window_as]()
        if p.kind == "kvcache":
            return args | {"num_splits": p.num_splits, "return_softmax_lse": p.return_attn_probs}
        return args | {
            "dropout_p": p.dropout_p, "deterministic": p.deterministic, "return_attn_probs": p.return_attn_probs,
        }  # fmt: skip

    def attention_inputs(self, tokens_q: tuple[int, ...], tokens_k: tuple[int, ...]) -> dict[str, Tensor]:
        p = self.p
        if p.kind.endswith("qkvpacked"):
            return {"qkv": self.tensor((*tokens_q, 3, p.nheads, p.head_dim), p.layouts[0], p.magnitude)}
        q = self.tensor((*tokens_q, p.nheads, p.head_dim), p.layouts[0], p.magnitude)
        if p.kind.endswith("kvpacked"):
            return {"q": q, "kv": self.tensor((*tokens_k, 2, p.nheads_k, p.head_dim), p.layouts[1], p.magnitude)}
        return {
            "q": q,
            "k": self.tensor((*tokens_k, p.nheads_k, p.head_dim), p.layouts[1], p.magnitude),
            "v": self.tensor((*tokens_k, p.nheads_k, p.value_dim), p.layouts[2]),
        }

    def dense(self) -> dict[str, Any]:
        batch = len(self.p.seqlens_q)
        return dict(self.attention_inputs((batch, self.p.seqlens_q[0]), (batch, self.p.seqlens_k[0])))

    def varlen(self) -> dict[str, Any]:
        p = self.p
        before, after = p.gap
        cu_q, cu_k = (self.cumulative(lengths, before) for lengths in (p.seqlens_q, p.seqlens_k))
        args: dict[str, Any] = {}
        if p.page_size:
            args |= self.attention_inputs((before + sum(p.seqlens_q) + after,), (0,))
            lengths = p.seqlens_k if p.seqused is None else p.seqused
            args["block_table"], args["k"], args["v"] = self.pages(lengths)
        else:
            args |= self.attention_inputs((before + sum(p.seqlens_q) + after,), (before + sum(p.seqlens_k) + after,))
        for name in {"q", "k", "v", "kv", "qkv"} & args.keys():
            if not (p.page_size and name in "kv"):
                self.poison_gap(args[name])
        longest_q, longest_k = (max(x, default=0) + p.max_seqlen_slack for x in (p.seqlens_q, p.seqlens_k))
        if p.max_seqlen_as == "tensor":
            longest_q, longest_k = torch.tensor(longest_q), torch.tensor(longest_k)  # type: ignore[assignment]
        if p.kind == "varlen_qkvpacked":
            return args | {"cu_seqlens": cu_q, "max_seqlen": longest_q}
        if p.kind == "private_varlen":
            longest_q, longest_k = int(longest_q), int(longest_k)
            args |= self.private_lengths(args, cu_k)
        return args | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}

    def cumulative(self, lengths: Sequence[int], start: int) -> Tensor:
        return self.ints(torch.tensor([start, *lengths]).cumsum(0).tolist())

    def private_lengths(self, args: dict[str, Any], cu_k: Tensor) -> dict[str, Tensor]:
        p = self.p
        found = {}
        if p.seqused is not None:
            found["seqused_k"] = self.ints(p.seqused)
        if p.leftpad is not None:
            found["leftpad_k"] = self.ints(p.leftpad)
        if p.poison and not p.page_size:
            for b, start in enumerate(cu_k.tolist()[:-1]):
                used = p.seqlens_k[b] if p.seqused is None else p.seqused[b]
                for name in ("k", "v"):
                    slab = args[name][start : start + p.seqlens_k[b]]
                    slab[: 0 if p.leftpad is None else p.leftpad[b]] = torch.nan
                    slab[used:] = torch.nan
        return found

    def pages(self, lengths: Sequence[int], reserve: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(block_table, k, v): pages in random order, rubbish in the table behind each sequence's last page."""
        p = self.p
        columns = [-(-(length + reserve) // p.page_size) for length in lengths]
        width = max(1, *columns, -(-p.capacity // p.page_size))
        order = self.shuffled(sum(columns) + 2).tolist()
        table = torch.full((len(lengths), width), 10**6 if p.poison else 0, dtype=torch.int32)
        for b, n in enumerate(columns):
            table[b, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
        blocks = sum(columns) + 2
        k = self.tensor((blocks, p.page_size, p.nheads_k, p.head_dim), p.layouts[1], p.magnitude)
        v = self.tensor((blocks, p.page_size, p.nheads_k, p.value_dim), p.layouts[2])
        if p.poison:
            for cache in (k, v):
                cache[order] = torch.nan
                for b, length in enumerate(lengths):
                    if length % p.page_size:
                        cache[int(table[b, length // p.page_size]), length % p.page_size :] = torch.nan
        return table.to(self.device), k, v

    def cache(self) -> dict[str, Any]:
        p = self.p
        batch, new = len(p.seqlens_q), p.new_keys or 0
        args: dict[str, Any] = {
            "q": self.tensor((batch, p.seqlens_q[0], p.nheads, p.head_dim), p.layouts[0], p.magnitude)
        }
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
            args["k"] = self.tensor((batch, new, p.nheads_k, p.head_dim), p.layouts[0], p.magnitude)
            args["v"] = self.tensor((batch, new, p.nheads_k, p.value_dim), p.layouts[0])
        if p.rotary_dim:
            table = max(capacity, max(p.seqlens_k) + max(p.seqlens_q[0], new))
            angles = torch.rand(table, p.rotary_dim // 2, generator=self.generator) * 6.3
            args["rotary_cos"], args["rotary_sin"] = (
                t.to(self.dtype).to(self.device) for t in (angles.cos(), angles.sin())
            )
            args["rotary_interleaved"] = p.rotary_interleaved
        return args

    def contiguous_cache(self) -> dict[str, Tensor]:
        p = self.p
        batch = len(p.seqlens_q)
        rows = batch + 2 if p.batch_idx else batch
        k = self.tensor((rows, p.capacity, p.nheads_k, p.head_dim), p.layouts[1], p.magnitude)
        v = self.tensor((rows, p.capacity, p.nheads_k, p.value_dim), p.layouts[2])
        order = self.shuffled(rows)[:batch] if p.batch_idx else torch.arange(batch)
        if p.poison:
            for b, row in enumerate(order.tolist()):
                for cache in (k, v):
                    cache[row, p.seqlens_k[b] :] = torch.nan
                    cache[row, : 0 if p.leftpad is None else p.leftpad[b]] = torch.nan
        args = {"k_cache": k, "v_cache": v}
        return args | {"cache_batch_idx": self.ints(order.tolist())} if p.batch_idx else args


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x (..., heads, dim) as a view of another memory layout, NaN in the memory between."""
    if layout == "contiguous":
        return x
    if layout == "sliced":  # one of several tensors packed in front of the heads
        base = x.new_full((*x.shape[:-2], 2, *x.shape[-2:]), torch.nan)
        base[..., 1, :, :] = x
        return base[..., 1, :, :]
    if layout == "heads_first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "wide_rows":
        base = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
        base[..., : x.shape[-1]] = x
        return base[..., : x.shape[-1]]
    if layout == "offset":  # a pointer that is aligned to nothing
        base = x.new_full((x.numel() + 1,), torch.nan)
        base[1:] = x.flatten()
        return base[1:].view(x.shape)
    if layout == "strided_dim":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "one_head":
        return x[..., :1, :].expand(x.shape)
    if layout == "one_value":
        return (x.flatten()[:1] if x.numel() else x.new_ones(1)).view((1,) * x.dim()).expand(x.shape)
    raise ValueError(layout)


# ---------------------------------------------------------------- drawing


class Source(Protocol):
    """Where the choices come from: a seed here, hypothesis in test_properties.py.

    The first of the options and the lower bound are the simplest.
    """

    def integer(self, low: int, high: int) -> int: ...
    def pick(self, options: Sequence[T]) -> T: ...


class FromRandom:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def pick(self, options: Sequence[T]) -> T:
        return self.random.choice(options)


def _chance(source: Source, percent: int) -> bool:
    return source.integer(0, 99) >= 100 - percent


def random_problem(seed: int, kinds: Sequence[str] | None = None, dtypes: Sequence[str] | None = None) -> Problem:
    """Problem number `seed`, always the same one."""
    return draw_problem(FromRandom(seed), kinds, dtypes)


_KINDS = ("dense",) * 6 + ("varlen",) * 6 + ("kvcache",) * 6 + tuple(k for k in KINDS for _ in range(2))
_DTYPES = ("float32", "float16", "bfloat16") * 5 + ("float64",)
_HEAD_DIMS = (8, 16, 32, 64, 40, 24, 1, 5, 100, 128) * 3 + (264,)
_LAYOUTS = ("contiguous",) * 4 + ("sliced", "heads_first", "wide_rows", "offset", "strided_dim", "one_head")


def draw_problem(source: Source, kinds: Sequence[str] | None = None, dtypes: Sequence[str] | None = None) -> Problem:
    kind = source.pick(kinds or _KINDS)
    packed = kind.endswith("packed")
    dtype = source.pick(dtypes or _DTYPES)
    seqlens_q, seqlens_k = _lengths(source, kind)
    work = sum(q * k for q, k in zip(seqlens_q, seqlens_k, strict=True))
    small = work > 20_000
    found: dict[str, Any] = dict(
        kind=kind, dtype=dtype, seqlens_q=seqlens_q, seqlens_k=seqlens_k,
        nheads_k=1 if small else source.integer(1, 3),
        group=1 if small or kind.endswith("qkvpacked") else source.pick((1, 1, 2, 3)),
        head_dim=source.pick((8, 16)) if small else source.pick(_HEAD_DIMS),
        causal=source.pick((False, True)),
        window=_window(source, max(seqlens_k, default=0)),
        window_as=source.pick(("tuple", "tuple", "list", "tensor", "scalars")),
        alibi=source.pick(("", "", "", "h", "bh")),
        softmax_scale=source.pick((None, None, None, 0.05, 0.3, 1.0)),
        magnitude=source.pick((1.0, 1.0, 1.0, 3.0, 0.1)),
        return_attn_probs=source.pick((True, True, False)),
        poison=source.pick((False, True)),
        seed=source.integer(0, 2**31 - 1),
    )  # fmt: skip
    if not packed and _chance(source, 15):
        found["head_dim_v"] = source.pick((8, 16, 33))
    if _chance(source, 20):
        found["softcap"] = source.pick((30.0, 5.0, 0.5))
    if kind != "kvcache" and _chance(source, 20):
        found["dropout_p"] = source.pick((0.1, 0.17, 0.5, 0.9))
    if kind in WITH_GRADIENTS:
        found["deterministic"] = source.pick((False, True))
    found["layouts"] = _layouts(source, kind)
    if kind == "kvcache":
        found |= _cache_fields(source, found)
    elif "varlen" in kind or kind == "paged":
        found |= _varlen_fields(source, found)
    return Problem(**found)


def _length(source: Source) -> int:
    return source.integer(*source.pick(((0, 5), (1, 20), (1, 20), (10, 80), (120, 135), (0, 0))))


def _lengths(source: Source, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batch = source.integer(1, 4 if "varlen" in kind or kind == "paged" else 3)
    if _chance(source, 2):  # long enough for several blocks of anything
        batch = 1
        q, k = source.integer(1, 700), source.integer(300, 1500)
    elif kind == "kvcache":
        q, k = source.pick((1, 1, 2, 7, 33)), 0
    else:
        q, k = _length(source), _length(source)
    if kind == "kvcache":
        if k == 0:
            return (q,) * batch, tuple(_length(source) for _ in range(batch))
        return (q,), (k,)
    same = kind.endswith("qkvpacked") or _chance(source, 40)
    if "varlen" not in kind and kind != "paged":
        return (q,) * batch, (q if same else k,) * batch
    seqlens_q = (q, *(_length(source) for _ in range(batch - 1)))
    return seqlens_q, seqlens_q if same else (k, *(_length(source) for _ in range(batch - 1)))


def _window(source: Source, longest: int) -> tuple[int, int]:
    if _chance(source, 50):
        return (-1, -1)
    sides = (-1, 0, 1, source.integer(2, 20), longest, max(longest - 1, 0), 1000, -2)
    return source.pick(sides), source.pick(sides)


def _layouts(source: Source, kind: str) -> tuple[str, str, str, str]:
    if _chance(source, 40):
        return ("contiguous",) * 4
    dout = source.pick((*_LAYOUTS, "one_value"))
    inputs = _LAYOUTS
    if kind in ("kvcache", "paged", "private_varlen"):  # a cache must have a contiguous last dimension and be writable
        inputs = tuple(x for x in _LAYOUTS if x not in ("strided_dim", "one_head"))
    if kind.endswith("packed"):  # heads_first would be (.., H, 3, d) in memory, one_head makes q, k and v one
        inputs = tuple(x for x in _LAYOUTS if x != "one_head")
    q, k, v = source.pick(inputs), source.pick(inputs), source.pick(inputs)
    if "varlen" in kind:  # the gaps are written into these
        q, k, v, dout = ("contiguous" if x in ("one_head", "one_value") else x for x in (q, k, v, dout))
    return q, k, v, dout


def _varlen_fields(source: Source, fields: dict[str, Any]) -> dict[str, Any]:
    lengths = fields["seqlens_k"]
    found: dict[str, Any] = dict(
        gap=source.pick(((0, 0), (0, 0), (0, 0), (3, 0), (0, 5), (2, 2))),
        max_seqlen_slack=source.pick((0, 0, 0, 1, 50)),
        max_seqlen_as=source.pick(("int", "int", "tensor")),
    )
    if fields["kind"] == "private_varlen":
        found["head_dim"] = -(-fields["head_dim"] // 8) * 8  # the private functions do not pad
        if "head_dim_v" in fields:
            found["head_dim_v"] = 16
        if _chance(source, 70):
            found["seqused"] = tuple(source.integer(0, n) for n in lengths)
        if _chance(source, 30):
            found["page_size"] = source.pick((16, 7, 64, 256))
        elif _chance(source, 60):
            found["leftpad"] = tuple(source.integer(0, n) for n in found.get("seqused", lengths))
    if fields["kind"] == "paged":
        found["page_size"] = source.pick((16, 1, 7, 64, 256))
    return found


def _cache_fields(source: Source, fields: dict[str, Any]) -> dict[str, Any]:
    sq, lengths = fields["seqlens_q"][0], fields["seqlens_k"]
    found: dict[str, Any] = dict(
        lengths_as=source.pick(("tensor", "tensor", "int", "none")),
        num_splits=source.pick((0, 0, 1, 3)),
        new_keys=source.pick((None, 1, sq, sq, 5)),
        rotary_interleaved=source.pick((True, False)),
    )
    if found["lengths_as"] == "none":
        found["new_keys"] = None
    if found["lengths_as"] != "tensor":
        lengths = (max(lengths),) * len(lengths)
    reach = max(lengths) + (found["new_keys"] or 0)
    found["capacity"] = max(reach, sq, fields["group"], 1) + source.pick((0, 0, 1, 40))
    if _chance(source, 30):
        found["page_size"] = source.pick((16, 1, 7, 64, 256))
    if found["lengths_as"] == "none":
        page = found.get("page_size", 1)
        lengths = (-(-found["capacity"] // page) * page,) * len(lengths)
    if "page_size" not in found:
        found["batch_idx"] = _chance(source, 30)
        if _chance(source, 30):
            found["leftpad"] = tuple(source.integer(0, n) for n in lengths)
    dims = [n for n in (16, 32, 64, 128) if n <= fields["head_dim"]]
    if dims and found["new_keys"] is not None and _chance(source, 50):
        found["rotary_dim"] = source.pick(dims)
    return found | {"seqlens_k": lengths}
