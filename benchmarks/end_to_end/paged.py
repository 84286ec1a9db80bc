"""A server in the manner of nano-vllm: pages of 256 tokens, a cached prefix, decoding under CUDA graphs.

The default dtype and device are the model's while it is built and its graphs are captured, and the CPU's afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.end_to_end.program import Answer, Prepared, Setting, margins
from verify.contestants import textbook

PAGE = 256


class Shape(NamedTuple):
    vocabulary: int
    width: int
    layers: int
    nheads: int
    nheads_k: int
    head_dim: int
    mlp: int
    batch: int
    prefix: int  # tokens that all prompts share and the cache holds, whole pages
    prompt: int  # tokens of each prompt behind it
    new: int


REAL = Shape(151936, 1024, 28, 16, 8, 128, 3072, batch=8, prefix=2048, prompt=512, new=32)
TINY = Shape(97, 64, 2, 4, 2, 16, 96, batch=2, prefix=256, prompt=6, new=4)


class Step(NamedTuple):
    """What all layers of one forward pass share. Lengths of a prefill are None in a decode step."""

    slots: Tensor  # where each token's key and value go
    positions: Tensor
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 1
    max_seqlen_k: int = 0


Attend = Callable[[Tensor, Tensor, Tensor, Step], Tensor]  # q (tokens, nheads, head_dim) and a layer's pages


def by_flash_attn() -> Attend:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> Tensor:
        out: Tensor
        if step.cu_seqlens_q is None:
            out = flash_attn_with_kvcache(
                q.unsqueeze(1), k_cache, v_cache, cache_seqlens=step.seqlens_k, block_table=step.block_table,
                softmax_scale=q.shape[-1] ** -0.5, causal=True,
            )  # fmt: skip
            return out.squeeze(1)
        out = flash_attn_varlen_func(
            q, k_cache, v_cache, max_seqlen_q=step.max_seqlen_q, cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_k=step.max_seqlen_k, cu_seqlens_k=step.cu_seqlens_k, softmax_scale=q.shape[-1] ** -0.5,
            causal=True, block_table=step.block_table,
        )  # fmt: skip
        return out

    return attend


def by_gathering(attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Attend:
    """What one writes without flash-attn: fetch each sequence's pages, mask what lies behind its end."""

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> Tensor:
        rows = q.unflatten(0, (len(step.block_table), -1)).transpose(1, 2)
        group = q.shape[1] // k_cache.shape[2]
        k, v = (
            pages[step.block_table].flatten(1, 2).transpose(1, 2).repeat_interleave(group, 1)
            for pages in (k_cache, v_cache)
        )
        last = step.seqlens_k[:, None] - rows.shape[2] + torch.arange(rows.shape[2], device=q.device)
        visible = torch.arange(k.shape[2], device=q.device) <= last[..., None]
        out = attention(rows, k, v, visible[:, None])
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = (shape.nheads + 2 * shape.nheads_k) * shape.head_dim
        self.qkv = nn.Linear(shape.width, heads, bias=False)
        self.out = nn.Linear(shape.nheads * shape.head_dim, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor, cache: Tensor, rotation: tuple[Tensor, Tensor], step: Step, attend: Attend) -> Tensor:
        shape = self.shape
        heads = self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (-1, shape.head_dim))
        q, k, v = heads.split((shape.nheads, shape.nheads_k, shape.nheads_k), dim=1)
        q, k = _rotated(F.rms_norm(q, q.shape[-1:]), rotation), _rotated(F.rms_norm(k, k.shape[-1:]), rotation)
        for pages, new in zip(cache, (k, v)):
            pages.view(-1, *new.shape[1:]).index_copy_(0, step.slots, new)
        x = x + self.out(attend(q, cache[0], cache[1], step).flatten(1))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Model(nn.Module):
    def __init__(self, shape: Shape, longest: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        frequencies = 1e6 ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
        angles = torch.arange(longest, dtype=torch.float32)[:, None] * frequencies
        dtype = torch.get_default_dtype()
        self.cos, self.sin = angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor, cache: Tensor, step: Step, attend: Attend) -> Tensor:
        x = self.tokens(tokens)
        rotation = self.cos[step.positions], self.sin[step.positions]
        for layer, pages in zip(self.layers, cache):
            x = layer(x, pages, rotation, step, attend)
        hidden: Tensor = F.rms_norm(x, x.shape[-1:])
        return hidden


@contextmanager
def _defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


class Server:
    """Sequences that share a prefix. Sequence b's own pages follow those of the prefix in its row of the table."""

    def __init__(self, setting: Setting) -> None:
        self.shape = shape = TINY if setting.tiny else REAL
        self.device = setting.device
        kind = setting.implementation.kind
        self.attend = by_flash_attn() if setting.implementation.is_flash else by_gathering(
            _sdpa if kind in ("sdpa", "switched") else textbook
        )  # fmt: skip
        own = -(-(shape.prompt + shape.new) // PAGE)
        shared = shape.prefix // PAGE
        pages = shared + shape.batch * own
        torch.manual_seed(0)
        with _defaults(setting.dtype, setting.device):
            self.model = Model(shape, shape.prefix + own * PAGE)
            size = (shape.layers, 2, pages, PAGE, shape.nheads_k, shape.head_dim)
            self.cache = torch.zeros(size)
            table = torch.arange(shared, pages, dtype=torch.int32).view(shape.batch, own)
            prefix = torch.arange(shared, dtype=torch.int32).expand(shape.batch, -1)
            self.block_table = torch.cat((prefix, table), 1).contiguous()
            self._prefill_prefix()
            self._static()
        self.graph = self._captured() if setting.device.startswith("cuda") else None

    def _ids(self, seed: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.shape.vocabulary, (count,), generator=generator, device="cpu").to(self.device)

    def _slots(self, positions: Tensor) -> Tensor:
        """(batch, tokens) positions to slots of the cache."""
        pages = self.block_table.gather(1, positions // PAGE)
        return (pages * PAGE + positions % PAGE).flatten().long()

    @torch.inference_mode()
    def _prefill_prefix(self) -> None:
        length = self.shape.prefix
        positions = torch.arange(length)
        ends = torch.tensor([0, length], dtype=torch.int32)
        step = Step(positions, positions, self.block_table[:1], ends[1:], ends, ends, length, length)
        self.model(self._ids(1, length), self.cache, step, self.attend)

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        """The prompts behind the cached prefix; the logits of their last tokens."""
        shape, device = self.shape, self.device
        batch, longest = shape.batch, shape.prefix + shape.prompt
        positions = torch.arange(shape.prefix, longest, device=device).expand(batch, -1)
        counts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        used = torch.full((batch,), longest, dtype=torch.int32, device=device)
        step = Step(
            self._slots(positions), positions.flatten(), self.block_table, used, counts * shape.prompt,
            counts * longest, shape.prompt, longest,
        )  # fmt: skip
        hidden = self.model(self._ids(2, batch * shape.prompt), self.cache, step, self.attend)
        logits: Tensor = self.model.head(hidden.unflatten(0, (batch, -1))[:, -1])
        return logits

    def _static(self) -> None:
        """The buffers that a graph reads."""
        batch, start = self.shape.batch, self.shape.prefix + self.shape.prompt
        self.tokens = torch.zeros(batch, dtype=torch.int64)
        self.positions = torch.full((batch,), start)
        self.slots = self._slots(self.positions[:, None])
        self.seqlens_k = torch.full((batch,), start + 1, dtype=torch.int32)

    def _forward(self) -> Tensor:
        step = Step(self.slots, self.positions, self.block_table, self.seqlens_k)
        hidden: Tensor = self.model(self.tokens, self.cache, step, self.attend)
        return hidden

    @torch.inference_mode()
    def _captured(self) -> torch.cuda.CUDAGraph:
        with _defaults(self.cache.dtype, self.device):
            self._forward()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.hidden = self._forward()
        return graph

    @torch.inference_mode()
    def decode(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """`new` steps from the tokens `first`: the tokens and their logits' margins, both (batch, new)."""
        tokens, ahead = [], []
        next_token = first
        for index in range(self.shape.new):
            position = self.shape.prefix + self.shape.prompt + index
            self.tokens.copy_(next_token)
            self.positions.fill_(position)
            self.slots.copy_(self._slots(self.positions[:, None]))
            self.seqlens_k.fill_(position + 1)
            if self.graph is None:
                self.hidden = self._forward()
            else:
                self.graph.replay()
            logits = self.model.head(self.hidden)
            next_token = logits.argmax(-1)
            tokens.append(next_token)
            ahead.append(margins(logits))
        return torch.stack(tokens, 1), torch.stack(ahead, 1)


def prefix(setting: Setting) -> Prepared:
    """Prefill of prompts whose beginning is cached: varlen attention over pages."""
    return Prepared(Server(setting).prefill, lambda logits: {"logits": logits})


def decode(setting: Setting) -> Prepared:
    server = Server(setting)
    first = server.prefill().argmax(-1)

    def answer(found: tuple[Tensor, Tensor]) -> Answer:
        return {"tokens": found[0], "margins": found[1]}

    return Prepared(lambda: server.decode(first), answer, tokens=server.shape.batch * server.shape.new)
