"""The arguments by which locate and ladder describe a problem, and the code that draws the same inputs elsewhere."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch

from .call import DTYPES, SHORT
from .environment import checked_devices
from .errors import UsageError

NAMES = {short: dtype for dtype, short in SHORT.items()} | DTYPES


def positive(text: str) -> int:
    """Parse a whole number from 1 on, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def number(text: str) -> float:
    """Parse a finite number of at least 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def dtype(text: str) -> torch.dtype:
    """Parse a dtype such as fp32 or float32, for argparse."""
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"unknown dtype {text!r}; there are {', '.join(NAMES)}")
    return NAMES[text]


def add_problem_arguments(parser: argparse.ArgumentParser, batch: int, heads: int, head_dim: int = 64) -> None:
    """Add the arguments that describe a problem, except its lengths."""
    add = parser.add_argument
    add("--br", type=positive, default=64, metavar="ROWS", help="query rows of a tile (default 64)")
    add("--bc", type=positive, default=64, metavar="COLUMNS", help="keys of a tile (default 64)")
    add("--batch", type=positive, default=batch, metavar="B", help=f"default {batch}")
    add("--heads", type=positive, default=heads, metavar="H", help=f"default {heads}")
    add("--head-dim", type=positive, default=head_dim, metavar="D", help=f"default {head_dim}")
    add("--causal", action="store_true", help="with the causal mask")
    add("--dtype", type=dtype, default=torch.float32, help="fp16, bf16, fp32 (default) or fp64")
    add("--device", default="cpu", help="cpu (default), cuda, cuda:1, mps")
    add("--seed", type=int, default=0, metavar="S", help="of the inputs (default 0)")


def add_option_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flash_attn_func's further options, for kernels that take them."""
    add = parser.add_argument
    add("--window", type=int, nargs=2, default=(-1, -1), metavar=("LEFT", "RIGHT"), help="window_size")
    add("--softcap", type=number, default=0.0, metavar="X", help="softcap")
    add("--softmax-scale", type=number, default=None, metavar="X", help="default 1 / sqrt(head_dim)")
    add("--alibi", action="store_true", help="with ALiBi's slopes, powers of two")
    add("--magnitude", type=number, default=1.0, metavar="X", help="factor of q and k: 6 makes large scores")


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return these options as fields of a Problem."""
    found: dict[str, Any] = {"window": tuple(arguments.window), "softcap": arguments.softcap}
    found |= {"softmax_scale": arguments.softmax_scale, "alibi": "powers" if arguments.alibi else ""}
    return found | {"magnitude": arguments.magnitude}


def described(arguments: argparse.Namespace) -> str:
    """Describe the problem in a line, without its lengths."""
    return (
        f"batch {arguments.batch}, {arguments.heads} heads, head_dim {arguments.head_dim}, {SHORT[arguments.dtype]}, "
        f"{'causal' if arguments.causal else 'not causal'}, tiles of {arguments.br} rows x {arguments.bc} keys"
    )


def checked_device(arguments: argparse.Namespace) -> str:
    """Return the requested device. Raises UsageError"""
    (device,) = checked_devices([arguments.device])
    if device.startswith("mps") and arguments.dtype == torch.float64:
        raise UsageError("the device mps has no fp64")
    return device


def recipe(kind: torch.dtype, seed: int, backward: bool = False, magnitude: float = 1.0) -> str:
    """Return Python code, as text, that draws the same inputs elsewhere."""
    larger = "" if magnitude == 1 else f", q and k times {magnitude:g} before .to"
    return (
        f"q, k, v{', dout' * backward} in this order: "
        f"torch.randn(batch, seqlen, heads, head_dim, generator=g).to({kind}), "
        f'g = torch.Generator("cpu").manual_seed({seed}){larger}'
    )
