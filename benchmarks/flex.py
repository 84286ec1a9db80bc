"""flex_attention on our kernels as on a Turing GPU, beside Triton's with all of this GPU's instructions, and our own.

`python -m benchmarks.flex [--head-dim 64] [--only TEXT] [--tokens 4096] [--json FILE]`

Twelve pairs of functions. "own" is flash_attn_func with the same mask as a feature (causal, window, softcap, ALiBi), by
the same kernels without functions. Contestants take turns. Before that, several processes compile everything in
parallel into the caches on disk; their seconds are listed apart. FLASH_ATTN_COMPAT_CAPABILITY is 7.5 unless it is set.
Milliseconds are the GPU's: it sleeps until the host has launched every call, or short calls would show the host's time.
The host's microseconds a call are listed beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import settings

BATCH, HEADS, WINDOW, CAP = 2, 16, 512, 20.0
KEY_HEADS = {64: 16, 128: 4}
CONTESTANTS = ("ours", "triton", "own")
REPEATS, WARM = 15, 3
SLEEP = 100_000_000  # cycles of the GPU, some 50 ms: longer than the host takes for REPEATS calls
Mod = Callable[..., Tensor]


class Entry(NamedTuple):
    """A pair of functions; ``own``: keywords with which flash_attn_func computes the same, None if it cannot."""

    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    per_batch: bool = False
    own: Mapping[str, Any] | None = None


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv <= WINDOW)


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return CAP * torch.tanh(score / CAP)


def checkerboard(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.where((q - kv).abs() % 2 == 1, score * 0.5, score)


def entries(tokens: int, device: str) -> dict[str, Entry]:
    """Return the twelve pairs of functions over ``tokens`` tokens."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 8, (BATCH, tokens), generator=generator).sort()[0].to(device)
    slopes = torch.exp2(-(torch.arange(1, HEADS + 1, dtype=torch.float32) * 8 / HEADS)).to(device)
    table = torch.randn(HEADS, 2 * tokens, generator=generator).to(device)
    lengths = torch.tensor([tokens // 4, tokens // 2], dtype=torch.int32, device=device)
    width = int(tokens**0.5)

    def document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (numbers[b, q] == numbers[b, kv])

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - slopes[h] * (q - kv).abs()

    def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + table[h, q - kv + tokens]

    def prefix(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < lengths[b]) | (q >= kv)

    def natten(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((q % width - kv % width).abs() <= 6) & ((q // width - kv // width).abs() <= 6)

    return {
        "causal": Entry(None, causal, own={"causal": True}),
        "window": Entry(None, window, own={"window_size": (WINDOW, 0)}),
        "softcap": Entry(softcap, own={"softcap": CAP}),
        "softcap, causal": Entry(softcap, causal, own={"softcap": CAP, "causal": True}),
        "ALiBi": Entry(alibi, own={"alibi_slopes": slopes}),
        "ALiBi, causal": Entry(alibi, causal, own={"alibi_slopes": slopes, "causal": True}),
        "documents": Entry(None, document, per_batch=True),
        "documents, softcap": Entry(softcap, document, per_batch=True),
        "prefix LM": Entry(None, prefix, per_batch=True),
        "natten": Entry(None, natten),
        "relative positions": Entry(relative, causal),
        "checkerboard": Entry(checkerboard, causal),
    }


class Calls(NamedTuple):
    """A contestant's two functions to time: the forward, and the forward with its backward."""

    forward: Callable[[], Any]
    training: Callable[[], Any]
    is_ours: bool


def make_calls(entry: Entry, head_dim: int, options: argparse.Namespace) -> dict[str, Calls]:
    """Return the chosen contestants for a pair of functions, all over the same tensors."""
    found = _make_calls(entry, head_dim, options.tokens, options.device)
    return {name: calls for name, calls in found.items() if name in options.contestants}


def _make_calls(entry: Entry, head_dim: int, tokens: int, device: str) -> dict[str, Calls]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    heads_k = KEY_HEADS.get(head_dim, HEADS)
    shapes = [(BATCH, tokens, heads, head_dim) for heads in (HEADS, heads_k, heads_k)]
    qkv = [torch.randn(shape, dtype=torch.float16, device=device).transpose(1, 2) for shape in shapes]
    leaves = [x.detach().requires_grad_() for x in qkv]
    dout = torch.randn(shapes[0], dtype=torch.float16, device=device).transpose(1, 2)
    options: dict[str, Any] = {"enable_gqa": heads_k != HEADS, "score_mod": entry.score_mod}
    if entry.mask_mod is not None:
        batch = BATCH if entry.per_batch else None
        options["block_mask"] = create_block_mask(entry.mask_mod, batch, None, tokens, tokens, device=device)

    def make_flex(is_ours: bool) -> Calls:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flex_attention(q, k, v, **options)

        compiled = torch.compile(attend, dynamic=False)

        def forward() -> Any:
            with torch.no_grad():
                return compiled(*qkv)

        return Calls(forward, lambda: torch.autograd.grad(compiled(*leaves), leaves, dout), is_ours)

    found = {"ours": make_flex(True), "triton": make_flex(False)}
    if entry.own is not None:
        own, turned = dict(entry.own), [x.transpose(1, 2) for x in qkv]
        turned_leaves = [x.detach().requires_grad_() for x in turned]

        def attend(tensors: Sequence[Tensor]) -> Tensor:
            with flash_attn_compat.use_backend("fused"):
                return flash_attn_compat.flash_attn_func(*tensors, **own)

        found["own"] = Calls(
            lambda: attend(turned),
            lambda: torch.autograd.grad(attend(turned_leaves), turned_leaves, dout.transpose(1, 2)),
            False,
        )
    return found


def run(calls: Calls, name: str) -> Any:
    with flash_attn_compat.flex() if calls.is_ours else contextlib.nullcontext():
        return getattr(calls, name)()


def failure(calls: Calls) -> str | None:
    """Run a contestant forward and with its backward; return the last line of its error, or None."""
    try:
        for mode in ("forward", "training"):
            run(calls, mode)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # Triton's kernel may need more shared memory than the GPU has
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def compile_part(names: Sequence[str], options: argparse.Namespace) -> dict[str, float]:
    """Compile pairs of functions into the caches on disk; return the seconds for each contestant and pair."""
    seconds: dict[str, float] = {}
    for name in names:
        dim, _, entry = name.partition(" ")
        found = make_calls(entries(options.tokens, options.device)[entry], int(dim), options)
        for contestant, calls in found.items():
            begun = time.perf_counter()
            if failure(calls) is None:
                seconds[f"{contestant} {name}"] = time.perf_counter() - begun
        torch._dynamo.reset()
    return seconds


def compile_in_parallel(names: Sequence[str], options: argparse.Namespace) -> dict[str, float]:
    """Run ``compile_part`` for shares of the names in several processes at once; return all seconds."""
    arguments = [sys.executable, "-m", "benchmarks.flex", "--tokens", str(options.tokens)]
    arguments += ["--contestants", *options.contestants, "--compile"]
    parts = [names[start :: options.workers] for start in range(options.workers)]
    children = [
        subprocess.Popen([*arguments, *part], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for part in parts
        if part
    ]
    seconds: dict[str, float] = {}
    for child in children:
        told, errors = child.communicate()
        if child.returncode:
            print(f"compiling failed: {errors.strip().splitlines()[-1:]}", file=sys.stderr)
        else:
            seconds |= json.loads(told.strip().splitlines()[-1])
    return seconds


class Times(NamedTuple):
    """Medians for each contestant: the GPU's milliseconds of a call, and the host's microseconds to launch it."""

    gpu: dict[str, float]
    host: dict[str, float]


def time_in_turns(found: Mapping[str, Calls], mode: str) -> Times:
    """Time the contestants, which take turns."""
    readings: dict[str, list[float]] = {name: [] for name in found}
    launching: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(3):
        for name, calls in found.items():
            with flash_attn_compat.flex() if calls.is_ours else contextlib.nullcontext():
                call = getattr(calls, mode)
                for _ in range(WARM if turn else 2 * WARM):
                    call()
                torch.cuda.synchronize()
                torch.cuda._sleep(SLEEP)
                events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
                begun = [time.perf_counter()]
                for event in events:
                    event.record()
                    call()
                    begun.append(time.perf_counter())
                torch.cuda.synchronize()
                readings[name] += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
                launching[name] += [1e6 * (b - a) for a, b in itertools.pairwise(begun)]
    return Times(*({name: statistics.median(each) for name, each in one.items()} for one in (readings, launching)))


def relative_difference(found: Mapping[str, Calls], other: str) -> float:
    """Return the largest difference between our out and another contestant's, as a share of the largest number."""
    ours, right = (run(found[name], "forward").float() for name in ("ours", other))
    right = right.transpose(1, 2) if other == "own" else right
    return float((ours - right).abs().max() / right.abs().max())


def is_chosen(name: str, only: str) -> bool:
    """Whether a name contains one of the texts of --only, which are separated by semicolons."""
    return any(part in name for part in only.split(";"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flex", description=__doc__)
    parser.add_argument("--head-dim", type=int, action="append", metavar="N", help="64 and 128; repeatable")
    parser.add_argument("--only", default="", metavar="TEXT", help="entries whose names have this text; several by ;")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile; 0: none"
    )
    parser.add_argument("--compile", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    os.environ.setdefault(settings.CAPABILITY, "7.5")
    if options.compile:
        print(json.dumps(compile_part(options.compile, options)))
        return 0
    all_entries = entries(options.tokens, options.device)
    names = [
        f"{dim} {name}"
        for dim in options.head_dim or (64, 128)
        for name in all_entries
        if is_chosen(name, options.only)
    ]
    begun = time.perf_counter()
    seconds = compile_in_parallel(names, options) if options.workers else {}
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {BATCH} x {HEADS} heads x {options.tokens}, fp16"
    )
    print(f"compiled in {time.perf_counter() - begun:.0f} s; ms of ours / own (ratio) / Triton (Triton over ours)")
    rows: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {"forward": [], "training": []}
    for name in names:
        dim, _, entry = name.partition(" ")
        found = make_calls(all_entries[entry], int(dim), options)
        failures = {who: said for who, calls in found.items() if (said := failure(calls)) is not None}
        found = {who: calls for who, calls in found.items() if who not in failures}
        row: dict[str, Any] = {"failures": failures}
        words = [f"{who} failed: {said}" for who, said in failures.items()]
        other = next((name for name in ("triton", "own") if name in found), None)
        if "ours" in found and other is not None:
            row["difference"] = relative_difference(found, other)
            words.append(f"differ {row['difference']:.1e}")
        for mode in ("forward", "training") if "ours" in found else ():
            times, row[f"{mode}, host us"] = time_in_turns(found, mode)
            row[mode] = times
            ours = times["ours"]
            beside = f" / {times['own']:.3f} ({ours / times['own']:.2f})" if "own" in times else ""
            if "triton" in times:
                ratios[mode].append(times["triton"] / ours)
                beside += f" / {times['triton']:.3f} ({times['triton'] / ours:.2f})"
            host = " / ".join(f"{each:.0f}" for each in row[f"{mode}, host us"].values())
            words.append(f"{mode} {ours:.3f}{beside} [host us {host}]")
        row["seconds"] = {who: seconds.get(f"{who} {name}") for who in found}
        compiled = ", ".join(f"{who} {s:.1f} s" for who, s in row["seconds"].items() if s is not None)
        print(f"{name:22} {'; '.join(words)}; compiling {compiled}", flush=True)
        rows[name] = row
        torch._dynamo.reset()
    for mode, each in ratios.items():
        if not each:
            continue
        print(f"geometric mean of Triton over ours, {mode}: {math.exp(statistics.mean(map(math.log, each))):.3f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
