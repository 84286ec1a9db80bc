"""`python -m benchmarks` lists the benchmarks; `... NAME` runs one, as `python -m benchmarks.NAME` does."""

from __future__ import annotations

import importlib
import sys

PROGRAMS = {
    "bench": "speed and memory beside flash-attn and PyTorch, each answer checked: `python -m verify bench`",
    "cpu": "speed on a CPU, as ratios to PyTorch's own attention",
    "host_time": "host time of one small call with our kernels, no GPU needed; --packed: by each backend",
    "sdpa": "F.scaled_dot_product_attention without and with our kernels under it",
    "flex": "flex_attention on our kernels, beside Triton's and our own features",
    "flex_host": "the host's time of flex_attention on our kernels: warm calls, and a function's first",
    "flex_report": "registers, spills and instructions of kernels with functions of flex_attention; no GPU needed",
    "flex_pictures": "the pictures of docs/flex.md; no GPU needed",
    "small_calls": "small calls with gradients: the host's time and the GPU's alone, beside PyTorch's kernels",
    "head_dims": "our kernels beside PyTorch's flash kernel, head dim by head dim",
    "eight_bit": "our kernels over 8-bit caches beside 16-bit ones",
    "turing_peer": "our kernels beside flash-attention-turing's",
    "end_to_end": "whole programs beside flash-attn and SDPA",
    "vllm_serving": "vLLM with our attention and with Triton's: tokens compared, tokens a second",
    "fine_tuning": "loss curves of training, compared with eager attention's",
    "kernel_tiles": "each kernel's tiles on this GPU, to find the fastest",
    "tile_sweep": "more tiles at shapes that PyTorch's kernels win",
    "kernel_report": "registers, spills and instructions of each kernel; no GPU needed",
    "turing_sm": "each kernel's main loop on a simulated multiprocessor of sm_75; no GPU needed",
    "cache_error": "what a cache of 8-bit floats costs in accuracy; no GPU needed",
    "machine_code": "kernels whose machine code a change of their sources alters; no GPU needed",
    "first_step": "seconds of the first training step without compiled kernels",
    "kernel_ladder": "the forward from the plain loop to today's kernel, step by step; no GPU needed for its model",
}


def main(argv: list[str]) -> int:
    if argv and argv[0] in PROGRAMS:
        name, *options = argv
        module = importlib.import_module("verify.__main__" if name == "bench" else f"benchmarks.{name}")
        code: int = module.main(argv if name == "bench" else options)
        return code
    print("\n".join(f"{name:14} {description}" for name, description in PROGRAMS.items()))
    return 0 if not argv or argv[0] in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
