"""One implementation's process: runs programs one after the other, a file of results for each.

`python -m benchmarks.end_to_end.worker FOLDER IMPLEMENTATION DEVICE DTYPE REPEATS LIMIT TINY PROGRAM...`
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import flash_attn_compat
from benchmarks.end_to_end.program import Implementation, NotHere, Prepared, Setting, figure
from benchmarks.end_to_end.programs import PROGRAMS
from verify.timing import Job, allocations, free_memory, reading


def main(arguments: list[str]) -> None:
    folder, name, device, dtype, repeats, limit, tiny, *programs = arguments
    setting = Setting(device, getattr(torch, dtype), tiny == "tiny", Implementation(name))
    try:
        _make_ready(setting)
    except NotHere as reason:
        Path(folder, "not_here").write_text(str(reason))
        return
    for program in programs:
        signal.setitimer(signal.ITIMER_REAL, max(float(limit), 1e-3))  # which ends the process, wherever it is
        found = _measured(program, setting, int(repeats), Path(folder))
        signal.setitimer(signal.ITIMER_REAL, 0)
        Path(folder, f"{program}.json").write_text(json.dumps(found))
        print(f"{name:10} {program:22} {figure(found)}", flush=True)
        if setting.device.startswith("cuda"):
            free_memory()


def _make_ready(setting: Setting) -> None:
    implementation = setting.implementation
    if setting.tiny:
        torch.set_num_threads(1)
    if implementation.kind == "ours":
        flash_attn_compat.patch()
    if implementation.kind == "switched":
        from flash_attn_compat.aten import switch

        switch.hold(switch.Wish(always=True))  # for the life of this process
    if implementation.kind == "official":
        from verify.implementations import official

        package, word = official()
        if package is None:
            raise NotHere(word)
    if implementation.forced and float(implementation.forced) < 8.0:
        # Those before have neither.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def _measured(program: str, setting: Setting, repeats: int, folder: Path) -> dict[str, Any]:
    """What the table shows, or the error. The answer goes into a file beside."""
    try:
        flash_attn_compat.reset_backend_counts()
        prepared = PROGRAMS[program](setting)
        first = prepared.run()
        answer = {part: value.detach().float().cpu() for part, value in prepared.answer(first).items()}
        del first
        if not all(bool(value.isfinite().all()) for value in answer.values()):
            return {"error": "its answer is not finite"}
        torch.save(answer, folder / f"{program}.pt")
        held, peak = _memory(prepared, setting)
        ms = statistics.median(reading(Job(prepared.run), 1, setting.device) for _ in range(repeats))
        return {
            "ms": ms,
            "tokens_per_second": prepared.tokens / ms * 1e3 if prepared.tokens else None,
            "peak_bytes": peak,
            "held_bytes": held,
            "served_by": _served_by(setting),
        }
    except NotHere as reason:
        return {"error": str(reason), "not_here": True}
    except Exception as error:  # noqa: BLE001  a program that fails is a row
        return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}


def _memory(prepared: Prepared, setting: Setting) -> tuple[int, int]:
    """Bytes held before a run (weights, inputs, caches; not known of a CPU) and at its peak."""
    if not setting.device.startswith("cuda"):
        return 0, allocations(prepared.run).peak
    held = torch.cuda.memory_allocated()
    return held, held + allocations(prepared.run, setting.device).peak


def _served_by(setting: Setting) -> str:
    """Which of our backends served: a program that quietly computes in another way is no result of ours."""
    if setting.implementation.kind not in ("ours", "switched"):
        return ""
    counts = flash_attn_compat.backend_counts()
    if not counts:
        raise RuntimeError("no call of attention came to flash_attn_compat")
    return ", ".join(sorted(counts, key=lambda name: -counts[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
