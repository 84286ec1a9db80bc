"""F.scaled_dot_product_attention without and with this package's kernels under it, at shapes that programs use.

`FLASH_ATTN_COMPAT_CAPABILITY=7.5 python -m benchmarks.sdpa [--only TEXT] [--dtype bfloat16] [--json FILE]`

PyTorch's flash and cuDNN kernels are switched off, as they are on a Turing GPU. `--host` times small calls on the host
instead: what the switch adds to a call that is left alone, and what a served call costs beside flash_attn_func.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_attn_compat
from flash_attn_compat.aten.wish import Wish
from verify.timing import Allocations, Job, Timing, allocations, time_together


class Shape(NamedTuple):
    """One call: lengths are rows and keys; heads are query and key heads."""

    name: str
    batch: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    head_dim: int
    causal: bool = False
    mask: str = ""
    backward: bool = True


SHAPES = (
    Shape("Llama-like, 4 x 2048", 4, (2048, 2048), (32, 8), 128, causal=True),
    Shape("Qwen-like, 8192", 1, (8192, 8192), (16, 8), 128, causal=True),
    Shape("GPT-2-like, 8 x 1024", 8, (1024, 1024), (12, 12), 64, causal=True),
    Shape("SDXL, 4096 tokens", 2, (4096, 4096), (10, 10), 64),
    Shape("SDXL, 1024 tokens", 2, (1024, 1024), (20, 20), 64),
    Shape("SDXL, 77 words", 2, (4096, 77), (10, 10), 64),
    Shape("SD 1.5, 4096 tokens", 2, (4096, 4096), (8, 8), 40),
    Shape("SD 1.5, 1024 tokens", 2, (1024, 1024), (8, 8), 80),
    Shape("SD 1.5, 256 tokens", 2, (256, 256), (8, 8), 160),
    Shape("SD 1.5, 77 words", 2, (4096, 77), (8, 8), 40),
    Shape("Whisper, 8 x 1500", 8, (1500, 1500), (20, 20), 64),
    Shape("BERT, 32 x 512", 32, (512, 512), (12, 12), 64),
    Shape("ViT, 64 x 197", 64, (197, 197), (12, 12), 64),
    Shape("decode, grouped, 4096", 1, (1, 4096), (32, 8), 128, backward=False),
    Shape("decode, grouped, 8 x 4096", 8, (1, 4096), (32, 8), 128, backward=False),
    Shape("decode, 1024", 1, (1, 1024), (16, 16), 64, backward=False),
    Shape("decode, 8192", 1, (1, 8192), (16, 16), 64, backward=False),
    Shape("small, 8 x 32", 8, (32, 32), (8, 8), 64),
    Shape("small, 8 x 64", 8, (64, 64), (8, 8), 64),
    Shape("small, 8 x 128", 8, (128, 128), (8, 8), 64),
    Shape("a causal mask, 4 x 2048", 4, (2048, 2048), (32, 32), 128, mask="causal"),
    Shape("a packed step, 8192", 1, (8192, 8192), (32, 32), 128, mask="blocks"),
    Shape("a packed step, grouped", 1, (8192, 8192), (32, 8), 128, mask="blocks"),
    Shape("a packed step, -inf", 1, (8192, 8192), (32, 32), 128, mask="blocks as a bias"),
    Shape("8 padded prompts, 1024", 8, (1024, 1024), (32, 8), 128, mask="padded", backward=False),
    Shape("8 padded prompts, a step", 8, (1, 1024), (32, 8), 128, mask="padded", backward=False),
    Shape("8 padded prompts, 32 heads", 8, (1, 1024), (32, 32), 128, mask="padded", backward=False),
    Shape("BERT, padded 32 x 512", 32, (512, 512), (12, 12), 64, mask="keys"),
    Shape("T5, 8 x 512", 8, (512, 512), (12, 12), 64, mask="bias of heads"),
    Shape("Swin, 512 x 49", 512, (49, 49), (6, 6), 32, mask="bias of windows"),
)


class Row(NamedTuple):
    name: str
    part: str
    without_ms: float | None
    with_ms: float | None
    without_mib: float | None
    with_mib: float | None
    served: dict[str, int]

    def __str__(self) -> str:
        if self.without_ms is None or self.with_ms is None:
            return f"{self.name:26} {self.part:8} failed"
        ratio = self.without_ms / self.with_ms
        times = f"{self.without_ms:9.4f} {self.with_ms:9.4f} {ratio:6.2f}"
        memory = f"{self.without_mib or 0:9.1f} {self.with_mib or 0:9.1f}"
        return f"{self.name:26} {self.part:8} {times} {memory}  {self.served}"


def job(shape: Shape, dtype: torch.dtype, device: str, backward: bool) -> Callable[[], object]:
    """The call, forward or both ways, over tensors as projections leave them: rows before heads."""

    def made(length: int, heads: int) -> Tensor:
        x = torch.randn(shape.batch, length, heads, shape.head_dim, dtype=dtype, device=device).transpose(1, 2)
        return x.requires_grad_(backward)

    rows, keys = shape.lengths
    q, (k, v) = made(rows, shape.heads[0]), (made(keys, shape.heads[1]) for _ in range(2))
    options: dict[str, Any] = {"is_causal": shape.causal, "enable_gqa": shape.heads[0] != shape.heads[1]}
    if shape.mask:
        options["attn_mask"] = dense_mask(shape, dtype, device)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    if not backward:
        return forward
    dout = torch.randn(shape.batch, rows, shape.heads[0], shape.head_dim, dtype=dtype, device=device).transpose(1, 2)
    return lambda: torch.autograd.grad(forward(), (q, k, v), dout)


# Lengths of sequences that are packed into 8192 tokens, as a collator does; and what of 8 prompts is padding.
PACKED, PADDED = (2100, 1500, 900, 1300, 400, 700, 850, 442), (0, 500, 120, 800, 30, 300, 620, 900)


def dense_mask(shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
    """As programs make them: booleans, or biases in the dtype."""
    rows, keys = shape.lengths
    row, key = torch.arange(keys - rows, keys, device=device)[:, None], torch.arange(keys, device=device)
    if shape.mask == "bias of heads":
        return torch.randn(1, shape.heads[0], rows, keys, dtype=dtype, device=device)
    if shape.mask == "bias of windows":  # one for each of 64 windows, for each picture the same
        windows = torch.randn(64, shape.heads[0], rows, keys, dtype=dtype, device=device)
        return windows.repeat(shape.batch // 64 or 1, 1, 1, 1)[: shape.batch]
    if shape.mask == "keys":
        return (key < torch.randint(keys // 4, keys + 1, (shape.batch, 1), device=device))[:, None, None]
    seen = key <= row
    if shape.mask == "padded":
        return seen & (key >= torch.tensor(PADDED, device=device)[:, None, None])[:, None]
    if shape.mask != "causal":
        number = torch.repeat_interleave(torch.arange(len(PACKED)), torch.tensor(PACKED)).to(device)[:keys]
        seen = seen & (number[:, None] == number)
    if shape.mask == "blocks as a bias":
        return torch.zeros(rows, keys, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
    return seen


def compare(shape: Shape, dtype: torch.dtype, device: str, backward: bool, always: bool) -> Row:
    run, ways = job(shape, dtype, device, backward), {"without": nullcontext, "with": on(always)}
    flash_attn_compat.reset_backend_counts()
    with on(always)():
        run()
    served = flash_attn_compat.backend_counts()
    found = time_together({name: Job(run, around) for name, around in ways.items()}, device, 20, 3.0)
    times = [one.median_ms if isinstance(one, Timing) else None for one in found.values()]
    held = [allocations(run, device, around) for around in ways.values()]
    memory = [one.peak / 2**20 if isinstance(one, Allocations) else None for one in held]
    return Row(shape.name, "both" if backward else "forward", *times, *memory, served)


def on(always: bool) -> Callable[[], Any]:
    return lambda: flash_attn_compat.sdpa(always=always)


def host_times(device: str) -> None:
    """Microseconds of small calls on the host. On a CPU launches do nothing, and PyTorch's own calls compute."""
    from benchmarks.host_time import _without_gpu, microseconds

    wish: Any = flash_attn_compat.sdpa
    if device == "cpu":
        from tests.aten import originals

        _without_gpu()
        torch.set_num_threads(1)
        wish = functools.partial(originals.on, Wish(device="cpu"))
    half = torch.randn(2, 4, 16, 64, device=device).half()
    wide, mask = half.float(), torch.zeros(16, 16, dtype=torch.float16, device=device, requires_grad=True)
    rows_first, seen = half.transpose(1, 2).contiguous(), torch.ones(16, 16, dtype=torch.bool, device=device).tril()
    attend, ours = F.scaled_dot_product_attention, flash_attn_compat.flash_attn_func
    print(f"{'flash_attn_func':34} {microseconds(lambda: ours(rows_first, rows_first, rows_first), device):6.1f} us")
    grouped = half[:, :2]
    for name, call in {
        "left: fp32": lambda: attend(wide, wide, wide),
        "left: a mask that wants a gradient": lambda: attend(half, half, half, attn_mask=mask),
        "left: small": lambda: attend(half, half, half),
        "served: grouped heads": lambda: attend(half, grouped, grouped, enable_gqa=True),
        "served: grouped heads and a mask": lambda: attend(half, grouped, grouped, attn_mask=seen, enable_gqa=True),
    }.items():
        without = microseconds(call, device)
        with wish():
            within = microseconds(call, device)
        print(f"{name:34} {without:6.1f} us without, {within:6.1f} with: {within - without:+.1f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sdpa", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose name holds it")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--always", action="store_true", help="on a GPU that PyTorch has flash kernels for, too")
    parser.add_argument("--longest", type=int, help="cut lengths to this, to try the script itself")
    parser.add_argument("--host", action="store_true", help="the host's time of small calls instead")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    torch.backends.cuda.enable_flash_sdp(False)
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
        torch.backends.cuda.enable_cudnn_sdp(False)
    if options.host:
        host_times(options.device)
        return 0
    print(f"{'':26} {'':8} {'without':>9} {'with ms':>9} {'times':>6} {'without':>9} {'with MiB':>9}  served by")
    rows = []
    for shape in SHAPES:
        if options.only not in shape.name:
            continue
        if options.longest:
            shape = shape._replace(lengths=tuple(min(length, options.longest) for length in shape.lengths))
        for backward in (False, True) if shape.backward else (False,):
            rows.append(compare(shape, getattr(torch, options.dtype), options.device, backward, options.always))
            print(rows[-1], flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": [row._asdict() for row in rows]}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
