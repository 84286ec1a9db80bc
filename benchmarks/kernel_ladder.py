"""From the plain loop to today's forward kernel, step by step: `python -m benchmarks.kernel_ladder`.

Each step of kernel_ladder.cu adds one idea; docs/kernels.md explains them. On a GPU all steps are checked and timed; a
newer GPU than Turing gets Turing's instructions. The model needs no GPU, but NVRTC and cuobjdump (the test extra).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_report import Pipes, model_turing, useful_share
from benchmarks.runner import relative_difference
from flash_attn_compat import flash_attn_func, settings, use_backend
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, KernelFeatures, Kind, Sizes
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.launching import launcher, layouts, params
from tests.kernels import offline
from verify.environment import describe
from verify.timing import Failed, Job, Timing, attempt, fastest, time_together

SOURCE = Path(__file__).with_suffix(".cu")
IDEAS = (
    "plain loop: a thread for each row, every score twice",
    "online softmax: every score once",
    "loads of 16 bytes",
    "tiles of K and V in shared memory",
    "tensor cores, scores through shared memory",
    "scores stay in registers",
    "`ldmatrix` and swizzled tiles",
    "the next tile is on its way",
    "twice the rows for each tile of keys",
    "today's kernel",
)
TODAY = len(IDEAS) - 1
HEAD_DIMS = 64, 128
KEYS = 64  # keys of a tile in shared memory
# In steps 4 and 5 all rows of K and V begin in the same shared-memory banks. For a product of S, loading a word of K
# takes 8 turns; for a product of O, each of two words of V takes 4. That is 7 and 6 turns more than without conflicts.
MORE_TURNS = {4: 6.5, 5: 6.5}
TOLERANCE = 4e-3  # relative to the result's largest number: P and out are rounded to 2^-11
# A kernel that only multiplies: each of the 8 warps of a block issues 4 * 512 tensor-core instructions.
PEAK = Variant("tensor_peak", str(SOURCE.with_name("tensor_peak.cu")), (("TYPE", FP16),), 1, 256, 0)
BARE_LOOP = 8 * 4 * 512
PRODUCT_FLOPS = 2 * 16 * 8 * 8


def make_variant(step: int, head_dim: int, causal: bool) -> Variant:
    """Return the kernel of a step."""
    if step == TODAY:
        return variants.forward(Kind(75, FP16, Sizes(head_dim), KernelFeatures(local=causal)))
    is_tall = step == TODAY - 1
    warps = 8 if is_tall and head_dim > 64 else 4
    tiles, scores = 2 * KEYS * head_dim * 2, warps * 16 * (KEYS + 4) * 4
    shared = tiles * (step >= 3) + scores * (step == 4)
    macros = (("TYPE", FP16), ("D", head_dim), ("LOCAL", int(causal)), ("STEP", step))
    return Variant("ladder", str(SOURCE), macros, 128 if step < 4 or is_tall else 64, warps * 32, shared)


# ---- the model -------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """What the model says of a step.

    pipes: cycles of a T4's multiprocessor for 64 rows times 64 keys; share: the speed over the tensor cores' limit
    """

    pipes: Pipes
    share: float
    registers: int
    spilled: int

    @property
    def busiest(self) -> str:
        return max(zip(self.pipes, self.pipes._fields))[1]


def apply_model(step: int, head_dim: int, causal: bool) -> Model | None:
    """Apply kernel_report's model to a step's machine code; None without NVRTC and cuobjdump."""
    compiler = next(reversed(offline.compilers().values()), None)
    if compiler is None or offline.cuobjdump() is None:
        return None
    kernel = make_variant(step, head_dim, causal)
    compiled = offline.compiled(compiler, kernel, "sm_75")
    pipes = model_turing(count_tile_instructions(offline.instructions(compiled.cubin), step, head_dim), kernel)
    share = useful_share(pipes, kernel._replace(entry="forward"), head_dim, head_dim)
    return Model(pipes, share, compiled.registers, compiled.spilled)


def count_tile_instructions(code: list[tuple[int, str]], step: int, head_dim: int) -> Counter[str]:
    """Return the instructions that a warp executes for a tile of keys, by name.

    For steps without tensor cores: the instructions of the loops over single keys, times the keys of a tile. Loads from
    global memory count as loads from shared memory there, since the L1 cache is in the same unit.
    """
    if step >= 4:
        loop = offline.main_loop(code)
        turns = MORE_TURNS.get(step, 0) * sum(count for name, count in loop.items() if name.startswith("HMMA"))
        return loop + Counter({"LDS": int(turns)})
    counts = {loop: offline.count_instructions(code, *loop) for loop in offline.loops(code)}
    over_keys = [loop for loop, count in counts.items() if count["FFMA"] >= head_dim]
    found: Counter[str] = Counter()
    for start, end in over_keys:
        if not any((start, end) != inner and start <= inner[0] and inner[1] <= end for inner in over_keys):
            for name, count in counts[start, end].items():
                found[name.replace("LDG.E", "LDS")] += count * KEYS
    return found


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def pack_argument(kernel: Variant, q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool) -> tuple[int, bytes]:
    """Return the grid's blocks and struct Params for contiguous fp16 tensors (batch, seqlen, heads, head_dim)."""
    (batch, seqlen_q, nheads, head_dim), (_, seqlen_k, nheads_k, _) = q.shape, k.shape
    shapes = {"q": q.shape, "k": (batch, seqlen_k, nheads_k, head_dim), "v": k.shape, "out": q.shape}
    given = {"q": q, "k": k, "v": v, "out": out}
    for name, tensor in given.items():
        is_right = tensor.shape == shapes[name] and tensor.dtype == torch.half and tensor.device == q.device
        if not (is_right and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 and tensor.numel()):
            raise ValueError(f"{name} must be contiguous fp16 {tuple(shapes[name])}, got {tuple(tensor.shape)}")
    if ("D", head_dim) not in kernel.macros or ("LOCAL", int(causal)) not in kernel.macros or nheads % nheads_k:
        raise ValueError(f"q and k of {head_dim} channels and {nheads} and {nheads_k} heads do not fit {kernel.macros}")
    tiles = -(-seqlen_q // kernel.rows)
    rest = params.pack_rest(
        {
            **{f"{name}_s": layouts.kernel_strides(tensor) for name, tensor in given.items()},
            "batch": batch,
            "nheads": nheads,
            "nheads_k": nheads_k,
            "group": nheads // nheads_k,
            "seqlen_q": seqlen_q,
            "tiles": tiles,
            "softmax_scale": head_dim**-0.5,
        }
    )
    head = params.head_struct([*given]).pack(*(tensor.data_ptr() for tensor in given.values()), seqlen_k)
    return tiles * nheads * batch, head + rest


def make_job(step: int, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Job:
    """Return a job that runs the kernel of a step and returns its result."""
    if step == TODAY:
        return Job(partial(flash_attn_func, q, k, v, causal=causal), partial(use_backend, "fused"))
    kernel, device = make_variant(step, q.shape[-1], causal), q.get_device()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    loaded, launch = nvrtc.kernel(kernel, device), nvrtc.driver().launch
    blocks, packed = pack_argument(kernel, q, k, v, out, causal)

    def run() -> Tensor:
        launch(loaded, blocks, device, packed)
        return out

    return Job(run)


def measure_peak() -> float:
    """Return the TFLOP/s of mma.m16n8k8 in a loop without loads."""
    blocks = 32 * torch.cuda.get_device_properties(0).multi_processor_count
    sums, kernel = torch.empty(blocks, device="cuda:0"), nvrtc.kernel(PEAK, 0)
    head, rest = params.head_struct(["lse"]), params.pack_rest({})
    ms = fastest(partial(launcher.launch_over, [sums], kernel, blocks, head, rest))
    return blocks * BARE_LOOP * PRODUCT_FLOPS / ms / 1e9


class Measured(NamedTuple):
    timing: Timing | Failed
    error: float  # relative to the largest number of the result
    tflops: float
    share: float  # tflops over the measured peak


def measure(options: argparse.Namespace, peak: float, device: str = "cuda:0") -> list[Measured]:
    """Check and time all steps."""
    shape = options.batch, options.seqlen, options.heads, options.head_dim
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.empty(shape, device=device, dtype=torch.half).normal_(generator=generator) for _ in range(3))
    nvrtc.load_all([make_variant(step, options.head_dim, options.causal) for step in range(TODAY + 1)], q.get_device())
    jobs = {str(step): make_job(step, q, k, v, options.causal) for step in range(TODAY + 1)}
    right = torch.cat(
        [compute_in_fp32(q[b : b + 1], k[b : b + 1], v[b : b + 1], options.causal) for b in range(options.batch)]
    )
    errors = {name: attempt(device, measure_error, each, right) for name, each in jobs.items()}
    timings = time_together(jobs, device, options.repeats, budget_s=1.0)
    pairs = options.seqlen * (options.seqlen + 1) / 2 if options.causal else options.seqlen**2
    flops = 4 * options.batch * options.heads * options.head_dim * pairs
    found = []
    for name, timing in timings.items():
        error = errors[name]
        tflops = flops / timing.median_ms / 1e9 if isinstance(timing, Timing) else 0.0
        found.append(Measured(timing, error if isinstance(error, float) else float("inf"), tflops, tflops / peak))
    return found


def compute_in_fp32(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention, computed by PyTorch in fp32: the right result for all steps."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def measure_error(job: Job, right: Tensor) -> float:
    with job.around():
        result = job.run()
    assert isinstance(result, Tensor)
    return relative_difference(result, right)


# ---- the table -------------------------------------------------------------------------------------------------------


def format_gains(costs: list[float]) -> list[str]:
    """Format how many times faster each step is than the step before."""
    return ["", *(f"{before / after:.2f}" for before, after in itertools.pairwise(costs))]


def model_columns(models: list[Model]) -> dict[str, list[str]]:
    cycles = [max(each.pipes) for each in models]
    return {
        "registers": [f"{each.registers}" + f", {each.spilled} B spilled" * bool(each.spilled) for each in models],
        "busiest": [each.busiest for each in models],
        "cycles": [f"{each:,.0f}" for each in cycles],
        "gain": format_gains(cycles),
        "share": [f"{each.share:.3f}" for each in models],
    }


def gpu_columns(found: list[Measured]) -> dict[str, list[str]]:
    times = [each.timing.median_ms if isinstance(each.timing, Timing) else float("nan") for each in found]
    return {
        "ms": [f"{ms:.3f}" for ms in times],
        "TFLOP/s": [f"{each.tflops:.2f}" for each in found],
        "gain (GPU)": format_gains(times),
        "share (GPU)": [f"{each.share:.3f}" for each in found],
    }


def format_table(columns: dict[str, list[str]]) -> str:
    """Format columns as Markdown."""
    rows = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_ladder", description=__doc__)
    parser.add_argument("--head-dim", type=int, default=64, choices=HEAD_DIMS)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="readings of each time (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    options = parser.parse_args(argv)
    columns = {"step": [str(step) for step in range(TODAY + 1)], "idea": [*IDEAS]}
    models = [apply_model(step, options.head_dim, options.causal) for step in range(TODAY + 1)]
    known = [each for each in models if each is not None]
    columns |= model_columns(known) if known else {}
    found: list[Measured] = []
    peak = 0.0
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() >= (8, 0):
            os.environ[settings.CAPABILITY] = "7.5"  # Turing's instructions
        peak = measure_peak()
        found = measure(options, peak)
        columns |= gpu_columns(found)
    if not known and not found:
        print("needs a CUDA GPU, or NVRTC and cuobjdump: pip install -e '.[test]' on x86-64 Linux")
        return 1
    environment = describe(["cuda" if found else "cpu"])
    print("\n".join(f"{label}: {fact}" for label, fact in environment.items()))
    mask = "causal" if options.causal else "full"
    print(f"\nhead_dim {options.head_dim}, {mask}; cycles of a T4's multiprocessor for 64 rows x 64 keys, by the model")
    if found:
        print(f"batch {options.batch}, {options.heads} heads, {options.seqlen} tokens; mma.m16n8k8: {peak:.1f} TFLOP/s")
    print(f"\n{format_table(columns)}\n")
    wrong = [f"step {step}: {fault}" for step, each in enumerate(found) if (fault := describe_fault(each))]
    print("\n".join(wrong) or ("every step's answer is right" if found else "no GPU: nothing was timed"))
    if options.json is not None:
        rows = [
            {"step": step, "idea": idea, "model": to_json(models[step]), "gpu": to_json(found[step] if found else None)}
            for step, idea in enumerate(IDEAS)
        ]
        given = {name: value for name, value in vars(options).items() if name != "json"}
        everything = {"environment": environment, "options": given, "peak_tflops": peak, "rows": rows}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 1 if wrong else 0


def describe_fault(found: Measured) -> str:
    if isinstance(found.timing, Failed):
        return found.timing.reason
    return "" if found.error <= TOLERANCE else f"the answer is off by {found.error:.2g} of the largest number"


def to_json(record: Model | Measured | None) -> dict[str, Any] | None:
    """Return a record as dicts for JSON."""
    if record is None:
        return None
    if isinstance(record, Model):
        return {**record._asdict(), "pipes": record.pipes._asdict(), "busiest": record.busiest}
    return {**record._asdict(), "timing": asdict(record.timing)}


if __name__ == "__main__":
    sys.exit(main())
