"""F.scaled_dot_product_attention without and with this package's kernels under it, at shapes that programs use.

`FLASH_ATTN_COMPAT_CAPABILITY=7.5 python -m benchmarks.sdpa [--only TEXT] [--dtype bfloat16] [--json FILE]`

PyTorch's flash and cuDNN kernels are disabled, since a Turing GPU has neither. `--host` measures the host time of small
calls instead: the cost of a declined call, and of a served call beside flash_attn_func. `--graphs` replays each call
from a CUDA graph, served at any size: the GPU's time alone, as on a slower GPU that never waits for the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_attn_compat
from benchmarks import host_time
from benchmarks.runner import DTYPES, Contest, forward_only, make_parser, run, time_one_by_one
from flash_attn_compat.torch_sdpa import override
from flash_attn_compat.torch_sdpa.policy import Policy
from verify.bench_run import Jobs
from verify.errors import NotSupported
from verify.graphs import capture
from verify.timing import Job

On = Callable[[], AbstractContextManager[object]]  # a context with our kernels under SDPA


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
    *(Shape(f"short, 512 x {length}", 512, (length, length), (12, 12), 64) for length in (32, 64, 100, 144, 192)),
    *(
        Shape(f"short, causal 512 x {length}", 512, (length, length), (12, 12), 64, causal=True)
        for length in (32, 64, 100, 128, 192)
    ),
    *(Shape(f"short, 512 x 128, head_dim {D}", 512, (128, 128), (768 // D, 768 // D), D) for D in (32, 96, 128, 256)),
    *(Shape(f"short, 512 x 64, head_dim {D}", 512, (64, 64), (768 // D, 768 // D), D) for D in (32, 96, 128, 192, 256)),
    *(
        Shape(f"short, padded 512 x {length}", 512, (length, length), (12, 12), 64, mask="keys")
        for length in (32, 64, 100)
    ),
    Shape("short, padded 512 x 64, head_dim 128", 512, (64, 64), (6, 6), 128, mask="keys"),
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


def with_and_without(on: On, **calls: Callable[[], object]) -> Mapping[str, Jobs]:
    """Return jobs of the calls, by mode, with our kernels and without."""
    return {"with": {mode: Job(call, on) for mode, call in calls.items()},
            "without": {mode: Job(call) for mode, call in calls.items()}}  # fmt: skip


def make_jobs(shape: Shape, dtype: torch.dtype, device: str, on: On) -> Mapping[str, Jobs]:
    """Return jobs of one shape's call. Its tensors have rows before heads in memory, as projections return them."""

    def draw(length: int, heads: int) -> Tensor:
        return torch.randn(shape.batch, length, heads, shape.head_dim, dtype=dtype, device=device).transpose(1, 2)

    rows, keys = shape.lengths
    qkv = draw(rows, shape.heads[0]), draw(keys, shape.heads[1]), draw(keys, shape.heads[1])
    leaves = [x.detach().requires_grad_() for x in qkv]
    options: dict[str, Any] = {"is_causal": shape.causal}
    if shape.heads[0] != shape.heads[1]:
        options["enable_gqa"] = True  # from PyTorch 2.5 on
    if shape.mask:
        options["attn_mask"] = dense_mask(shape, dtype, device)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*qkv, **options)

    def training() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, **options), leaves, dout)

    if not shape.backward:
        return with_and_without(on, forward=forward)
    dout = draw(rows, shape.heads[0])
    return with_and_without(on, forward=forward, both=training)


def capture_all(jobs: Mapping[str, Jobs], device: str) -> Mapping[str, Jobs]:
    """Return the calls as replays of CUDA graphs. Raises NotSupported if our kernels were captured in none of them."""
    flash_attn_compat.reset_backend_counts()
    replayed = {
        name: {mode: capture_job(job, device) for mode, job in by_mode.items()} for name, by_mode in jobs.items()
    }
    if not flash_attn_compat.backend_counts():
        raise NotSupported("left alone")
    return replayed


def capture_job(job: Job, device: str) -> Job:
    replay, results = capture(job, device)

    def again(kept: Job = job) -> object:  # keeps the tensors alive that the graph reads
        replay()
        return results

    return Job(again)


# Lengths of sequences that a collator packs into 8192 tokens; how many tokens of padding each of 8 prompts has.
PACKED, PADDED = (2100, 1500, 900, 1300, 400, 700, 850, 442), (0, 500, 120, 800, 30, 300, 620, 900)


def dense_mask(shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
    """Return a mask as programs make it: booleans, or biases in the dtype."""
    rows, keys = shape.lengths
    row, key = torch.arange(keys - rows, keys, device=device)[:, None], torch.arange(keys, device=device)
    if shape.mask == "bias of heads":
        return torch.randn(1, shape.heads[0], rows, keys, dtype=dtype, device=device)
    if shape.mask == "bias of windows":  # a bias for each of 64 windows, repeated for each image
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


def contests(dtype: torch.dtype, device: str, on: On, longest: int | None, graphs: bool) -> Iterator[Contest]:
    for shape in SHAPES:
        rows, keys = (min(length, longest or length) for length in shape.lengths)
        make = partial(make_jobs, shape._replace(lengths=(rows, keys)), dtype, device, on)
        yield Contest(shape.name, (lambda make=make: capture_all(make(), device)) if graphs else make, dtype)


def host_contests(device: str) -> Iterator[Contest]:
    """Yield contests of small calls. On a CPU our launches do nothing, and PyTorch's own calls compute."""
    on: On = flash_attn_compat.sdpa
    if device == "cpu":
        host_time.serve_without_gpu()
        torch.set_num_threads(1)
        on = partial(override.applied, Policy(device="cpu"))
    half = torch.randn(2, 4, 16, 64, device=device).half()
    wide, mask = half.float(), torch.zeros(16, 16, dtype=torch.float16, device=device, requires_grad=True)
    rows_first, seen = half.transpose(1, 2).contiguous(), torch.ones(16, 16, dtype=torch.bool, device=device).tril()
    attend, grouped = F.scaled_dot_product_attention, half[:, :2]
    ours = partial(flash_attn_compat.flash_attn_func, rows_first, rows_first, rows_first)
    yield Contest("flash_attn_func", lambda: forward_only({"ours": Job(ours)}))
    for name, call in {
        "left: fp32": lambda: attend(wide, wide, wide),
        "left: a mask that wants a gradient": lambda: attend(half, half, half, attn_mask=mask),
        "left: small": lambda: attend(half, half, half),
        "served: grouped heads": lambda: attend(half, grouped, grouped, enable_gqa=True),
        "served: grouped heads and a mask": lambda: attend(half, grouped, grouped, attn_mask=seen, enable_gqa=True),
    }.items():
        yield Contest(name, partial(with_and_without, on, forward=call))


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser("sdpa", __doc__)
    arguments.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--always", action="store_true", help="on a GPU that PyTorch has flash kernels for, too")
    arguments.add_argument("--longest", type=int, help="cut lengths to this, to try the script itself")
    instead = arguments.add_mutually_exclusive_group()
    instead.add_argument("--host", action="store_true", help="the host's time of small calls instead")
    instead.add_argument("--graphs", action="store_true", help="the GPU's time alone, of calls of any size, instead")
    options = arguments.parse_args(argv)
    device = options.device
    disable_flash_kernels()
    if options.host:
        clock = time_one_by_one(device, partial(host_time.milliseconds, device=device))
        return run("sdpa --host", host_contests(device), options, device, clock)
    policy = Policy(always=options.always)
    on = partial(override.applied, policy._replace(least_products=0, least_keys=0) if options.graphs else policy)
    chosen = contests(DTYPES[options.dtype], device, on, options.longest, options.graphs)
    return run("sdpa", chosen, options, device, weigh=not options.graphs)


def disable_flash_kernels() -> None:
    """Disable PyTorch's flash and cuDNN kernels, which GPUs before 8.0 do not have."""
    torch.backends.cuda.enable_flash_sdp(False)
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
        torch.backends.cuda.enable_cudnn_sdp(False)


if __name__ == "__main__":
    sys.exit(main())
