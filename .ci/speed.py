"""Write README's speed table and sentences, and the chart docs/figures/speed.svg, from docs/figures/speed.json.

    .venv/bin/python .ci/speed.py                            # from the data file as it is
    .venv/bin/python .ci/speed.py native.json forced.json    # fill the data file first

native.json, forced.json: the files of `flash-attn-compat verify bench --gpu --json FILE`, without and with
FLASH_ATTN_COMPAT_CAPABILITY=7.5, on one GPU that has flash-attn installed.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA, CHART = (ROOT / "docs/figures" / name for name in ("speed.json", "speed.svg"))
WORKLOADS = {  # every workload of the bench's full set, by its name there
    "uniform_varlen": "32 packed sequences of 4096, 8 heads, d 64",
    "skewed_varlen": "128 packed skewed sequences, 16 heads, d 64",
    "skewed_causal": "128 packed skewed sequences, causal",
    "ptv3_patches": "512 x 1024 points, 4 heads, d 16",
    "llm_gqa_causal": "8 x 2048 causal, 32/8 heads, d 128",
    "mistral_window": "16384 causal, window 1024, 32/8 heads, d 128",
    "modernbert_local": "8 packed, window 64 to either side, d 64",
    "alibi_causal": "4 x 4096 causal, ALiBi, 16 heads, d 64",
    "alibi_bidirectional": "4 x 2048, ALiBi, 16 heads, d 64",
    "gemma_softcap": "4096 causal, softcap, 8/4 heads, d 128",
    "gemma_softcap_window": "8192 causal, softcap, window 1024, d 128",
    "dropout_train": "8 x 1024 causal, dropout 0.1, d 64",
    "cross_short_q": "16 x 64 rows over 4096 keys, d 64",
}
IN_TABLE = "skewed_causal", "llm_gqa_causal", "mistral_window", "alibi_causal", "dropout_train"
MODES = "forward", "forward + backward"
OURS = {"native": "ours, unforced", "forced": "ours, forced to 7.5"}
CONTESTANTS = "default", "official"
SPARE_MIB = 4  # memory that a small workload may take beyond the percentage
Run = Mapping[str, Any]


# ---- the data file ---------------------------------------------------------------------------------------------------


def data_of(native: Run, forced: Run) -> dict[str, Any]:
    """Return the data file's content from two saved runs. flash-attn gets the better of its two times.

    Raises SystemExit if the runs lack a workload, differ in the GPU or its software, have a wrong answer, or measured
    flash-attn as ours.
    """
    environment, other = native["environment"], forced["environment"]
    if any(environment.get(key) != other.get(key) for key in ("torch", "dtype", "official flash-attn")):
        sys.exit(f"the two runs differ in torch, dtype or flash-attn: {environment}, {other}")
    gpu, forced_gpu = (
        next(value for key, value in each.items() if key.startswith("device")) for each in (environment, other)
    )
    if "forced" in gpu or "treated as 7.5 (forced)" not in forced_gpu or gpu.split(",")[0] != forced_gpu.split(",")[0]:
        sys.exit(f"the first run must be unforced, the second forced to 7.5 on the same GPU: {gpu!r}, {forced_gpu!r}")
    rows = [{(row["workload"], row["contestant"]): row for row in run["rows"]} for run in (native, forced)]
    shown = [
        (key, row) for table in rows for key, row in table.items() if key[0] in WORKLOADS and key[1] in CONTESTANTS
    ]
    if wrong := [key for key, row in shown if is_wrong(row)]:
        sys.exit(f"wrong answers: {wrong}")
    if any(key[1] == "default" and "official" in str(row.get("served_by")) for key, row in shown):
        sys.exit("flash-attn served our calls: both runs need FLASH_ATTN_COMPAT_DISABLE_OFFICIAL=1")
    workloads, percent = {}, 0.0
    for name in WORKLOADS:
        try:
            ours, theirs = ([table[name, who] for table in rows] for who in CONTESTANTS)
            times = [list(map(median, MODES_IN_JSON, [row] * 2)) for row in (*theirs, *ours)]
        except (KeyError, TypeError):
            sys.exit(f"{name}: no time of ours and flash-attn's, forward and forward + backward, in both runs")
        workloads[name] = {
            "official": list(map(min, *times[:2])),
            "native": times[2],
            "forced": times[3],
            "native_by": ours[0]["served_by"],
        }
        for mine, yours in zip(ours, theirs, strict=True):
            for key in ("memory_mib", "both_memory_mib"):
                percent = max(percent, 100 * (mine[key] - SPARE_MIB - yours[key]) / max(yours[key], 1))
    return {
        "gpu": gpu.split(",")[0],
        "torch": environment["torch"].split(" ")[0],
        "flash_attn": re.search(r"[\d.]*\d", environment["official flash-attn"])[0],
        "dtype": {"float16": "fp16", "bfloat16": "bf16"}[environment["dtype"]],
        "date": environment["date"].split(" ")[0],
        "memory_percent": math.ceil(percent),
        "workloads": workloads,
    }


MODES_IN_JSON = "forward", "both"


def median(mode: str, row: Run) -> float:
    return float(f"{row[mode]['median_ms']:.4g}")


def is_wrong(row: Run) -> bool:
    return row["failed"] or bool(row["verdict"] and not row["verdict"]["ok"])


# ---- README ----------------------------------------------------------------------------------------------------------


def section(data: Run) -> str:
    """Return what README shows of the data: the setting, five rows, the chart, and the sentences on all rows."""
    setting = (
        "Forward / forward + backward in ms, on one {gpu}, torch {torch}, {dtype}, {date}, by "
        "`flash-attn-compat verify bench --gpu`. flash-attn {flash_attn} ran beside both of our runs; its column has "
        "the better of its two figures. d is head_dim; 32/8 heads are 32 of queries and 8 of keys."
    ).format(**data)
    chart = f"![The bench's {len(WORKLOADS)} workloads beside flash-attn](docs/figures/speed.svg)"
    return "\n\n".join([fill(setting), table(data), chart, fill(closing(data))])


def fill(text: str) -> str:
    return textwrap.fill(text, 160, break_long_words=False, break_on_hyphens=False)


def table(data: Run) -> str:
    lines = ["| workload | flash-attn | ours, without flash-attn | ours, forced 7.5 |", "|---|---|---|---|"]
    for name in IN_TABLE:
        found = data["workloads"][name]
        cells = (" / ".join(map(milliseconds, found[who])) for who in ("official", "native", "forced"))
        lines.append(f"| {WORKLOADS[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speeds(data: Run, who: str, mode: int) -> list[float]:
    """Return flash-attn's time / ours for each workload: above 1 ours is faster."""
    return [found["official"][mode] / found[who][mode] for found in data["workloads"].values()]


def closing(data: Run) -> str:
    native, forced = ([geometric_mean(speeds(data, who, mode)) for mode in (0, 1)] for who in OURS)
    means = (
        f"In the geometric mean over all {len(WORKLOADS)}, ours without flash-attn reaches {native[0]:.2f} of its "
        f"speed forward and {native[1]:.2f} with the backward; forced to 7.5, {forced[0]:.2f} and {forced[1]:.2f}."
    )
    share = f"{data['memory_percent']} % plus " if data["memory_percent"] else ""
    memory = f"Our peak memory is at most {share}{SPARE_MIB} MiB above flash-attn's."
    return " ".join([means, *forced_ahead(data), memory])


def forced_ahead(data: Run) -> list[str]:
    """Return sentences on workloads that are faster forced than unforced, by more than 2 %, which may be noise."""
    said = []
    for mode, what in enumerate(MODES):
        ahead = {
            name: found
            for name, found in data["workloads"].items()
            if found["forced"][mode] < 0.98 * found["native"][mode]
        }
        by_pytorch = [WORKLOADS[name] for name, found in ahead.items() if "torch_flash" in found["native_by"]]
        others = [WORKLOADS[name] for name, found in ahead.items() if "torch_flash" not in found["native_by"]]
        for labels, why in ((by_pytorch, ": unforced, PyTorch's kernel serves there, forced ours"), (others, "")):
            if labels:
                said.append(f"Forced is faster than unforced, {what}, at {joined(labels)}{why}.")
    return said


def joined(labels: Sequence[str], most: int = 3) -> str:
    """Return the labels in quotes, or the first ones and the number of the others."""
    parts = [f'"{label}"' for label in labels[:most]]
    parts += [f"{len(labels) - most} more"] if len(labels) > most else []
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


BEGIN, END = "<!-- by .ci/speed.py -->\n\n", "\n\n<!-- end -->"


def with_section(readme: str, text: str) -> str:
    before, rest = readme.split(BEGIN)
    return before + BEGIN + text + END + rest.partition(END)[2]


# ---- the chart -------------------------------------------------------------------------------------------------------


def draw(data: Run, path: Path) -> None:
    """Draw flash-attn's time / ours of every workload, forward and with the backward, as an SVG whose text is text."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "speed", "font.family": "sans-serif", "font.size": 9}
    )
    figure, panels = pyplot.subplots(1, len(MODES), figsize=(10, 5.6), sharey=True, sharex=True)
    places = range(len(WORKLOADS))
    for mode, panel in enumerate(panels):
        for side, (who, label), colour in zip((-0.2, 0.2), OURS.items(), ("#2f6fb0", "#b35a00"), strict=True):
            values = speeds(data, who, mode)
            bars = panel.barh([place + side for place in places], values, 0.38, label=label, color=colour)
            panel.bar_label(bars, [f"{value:.2f}" for value in values], padding=-20, fontsize=7, color="white")
        panel.axvline(1.0, color="#444444", linewidth=1, zorder=0)
        panel.set_title(MODES[mode], fontsize=10)
        panel.set_xlabel("flash-attn's time / ours: beyond 1 ours is faster")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(places, WORKLOADS.values())
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower left", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    path.write_text("\n".join(map(str.rstrip, path.read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (0, 2):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments:
        runs = (json.loads(Path(argument).read_text(encoding="utf-8")) for argument in arguments)
        DATA.write_text(json.dumps(data_of(*runs), indent=1) + "\n", encoding="utf-8")
    data, readme = json.loads(DATA.read_text(encoding="utf-8")), ROOT / "README.md"
    readme.write_text(with_section(readme.read_text(encoding="utf-8"), section(data)), encoding="utf-8")
    draw(data, CHART)
    print(section(data))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
