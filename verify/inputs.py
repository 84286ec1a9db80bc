"""The problem that locate and ladder are given on the command line: its arguments, and always the same inputs."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from verify.call import SHORT
from verify.errors import UsageError

DTYPES = {short: dtype for dtype, short in SHORT.items()} | {
    str(dtype).removeprefix("torch."): dtype for dtype in SHORT
}


def positive(text: str) -> int:
    """An argparse type: 1, 2, ..."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def dtype(text: str) -> torch.dtype:
    """An argparse type: fp32 or float32, and so on."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"unknown dtype {text!r}; there are {', '.join(DTYPES)}")
    return DTYPES[text]


def short(kind: torch.dtype) -> str:
    return SHORT[kind]


def add_tile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--br", type=positive, default=64, metavar="ROWS", help="query rows of a tile (default 64)")
    parser.add_argument("--bc", type=positive, default=64, metavar="COLUMNS", help="keys of a tile (default 64)")


def add_problem_arguments(parser: argparse.ArgumentParser, batch: int, heads: int, head_dim: int) -> None:
    """Everything but the lengths."""
    parser.add_argument("--batch", type=positive, default=batch, metavar="B", help=f"default {batch}")
    parser.add_argument("--heads", type=positive, default=heads, metavar="H", help=f"default {heads}")
    parser.add_argument("--head-dim", type=positive, default=head_dim, metavar="D", help=f"default {head_dim}")
    parser.add_argument("--causal", action="store_true", help="with the causal mask")
    parser.add_argument("--dtype", type=dtype, default=torch.float32, help="fp16, bf16, fp32 (default) or fp64")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, mps")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the inputs (default 0)")


def draw(shapes: Mapping[str, Sequence[int]], kind: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Normal numbers, drawn in fp32 on the CPU so that every device and dtype sees the same problem."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return {name: torch.randn(tuple(shape), generator=generator).to(kind) for name, shape in shapes.items()}


def recipe(kind: torch.dtype, seed: int) -> str:
    """How to draw the same inputs elsewhere."""
    return (
        f"q, k, v in this order: torch.randn(batch, seqlen, heads, head_dim, generator=g).to({kind}), "
        f'g = torch.Generator("cpu").manual_seed({seed})'
    )


def check_picture(path: Path | None) -> None:
    """Before the work, like the other files."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise UsageError(f"cannot draw {path}: a name that ends in .png is needed")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    check_matplotlib()


def check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('matplotlib is not installed: pip install -c constraints.txt -e ".[verify]"')


def check_device(device: str, kind: torch.dtype) -> None:
    if device.startswith("mps") and kind == torch.float64:
        raise UsageError("the device mps has no fp64")
