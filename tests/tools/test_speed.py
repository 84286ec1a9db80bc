"""README's speed section and chart follow from docs/figures/speed.json, and .ci/speed.py fills that from two runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.forms.support import load_file
from verify.workloads import FULL

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.compile(r"<text\b[^>]*>([^<]*)</text>")


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return load_file(ROOT / ".ci/speed.py")


@pytest.fixture
def data(speed: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(speed.DATA.read_text(encoding="utf-8"))
    return found


def test_readmes_speed_section_follows_from_the_data_file(speed: ModuleType, data: dict[str, Any]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert speed.with_section(readme, speed.section(data)) == readme, "run .ci/speed.py"


def test_the_chart_shows_the_labels_and_ratios_of_the_data_file(
    speed: ModuleType, data: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the chart, and is not installed")
    drawn = tmp_path / "speed.svg"
    speed.draw(data, drawn)
    shown, expected = (TEXT.findall(path.read_text(encoding="utf-8")) for path in (speed.CHART, drawn))
    assert len(expected) > 4 * len(speed.WORKLOADS) and shown == expected, "run .ci/speed.py"


def test_the_data_file_has_every_full_workload_of_the_bench(speed: ModuleType, data: dict[str, Any]) -> None:
    assert list(speed.WORKLOADS) == list(data["workloads"]) == [workload.name for workload in FULL]


def run_of(ours: float, theirs: float, forced: bool = False, **changes: Any) -> dict[str, Any]:
    """Return a saved run in which a forward + backward takes ten times the forward."""
    rows = [
        {
            "workload": workload.name,
            "contestant": who,
            "served_by": "fused, torch_flash with gradients",
            "forward": {"median_ms": ms},
            "both": {"median_ms": 10 * ms},
            "memory_mib": mib,
            "both_memory_mib": mib,
            "verdict": {"ok": True},
            "failed": False,
        }
        for workload in FULL
        for who, ms, mib in (("default", ours, 114.0), ("official", theirs, 100.0))
    ]
    device = "NVIDIA H200, capability 9.0" + " treated as 7.5 (forced)" * forced
    environment = {
        "device cuda": device,
        "torch": "2.11.0+cu130 (CUDA 13.0)",
        "dtype": "float16",
        "official flash-attn": "flash_attn 2.8.3",
        "date": "2026-11-28 10:00 UTC",
    }
    return {"environment": {**environment, **changes}, "rows": rows}


def test_two_saved_runs_give_times_means_and_memory(speed: ModuleType) -> None:
    data = speed.data_of(run_of(2.0, 1.0), run_of(4.0, 1.5, forced=True))
    shown = speed.section(data).replace("\n", " ")
    assert "NVIDIA H200, torch 2.11.0+cu130, fp16, 2026-11-28" in shown and "flash-attn 2.8.3" in shown
    assert "d 128 | 1.00 / 10.0 | 2.00 / 20.0 | 4.00 / 40.0 |" in shown, "flash-attn has the better of its figures"
    assert "0.50 of its speed forward and 0.50 with the backward; forced to 7.5, 0.25 and 0.25." in shown
    assert "at most 10 % plus 4 MiB" in shown and "Forced is faster" not in shown


def test_workloads_that_are_faster_forced_are_named_with_the_reason(speed: ModuleType) -> None:
    native = run_of(2.0, 1.0)
    forced = run_of(2.0, 1.0, forced=True)
    for row in forced["rows"]:
        if row["workload"] in ("ptv3_patches", "cross_short_q"):
            row["both"] = {"median_ms": 15.0}
    (said,) = speed.forced_ahead(speed.data_of(native, forced))
    assert said == (
        'Forced is faster than unforced, forward + backward, at "512 x 1024 points, 4 heads, d 16" and "16 x 64 rows '
        "over 4096 keys, d 64\": unforced, PyTorch's kernel serves there, forced ours."
    )


@pytest.mark.parametrize(
    ("native", "forced", "said"),
    [
        (run_of(1.0, 1.0), run_of(1.0, 1.0), "must be unforced, the second forced"),
        (run_of(1.0, 1.0, forced=True), run_of(1.0, 1.0), "must be unforced, the second forced"),
        (run_of(1.0, 1.0), run_of(1.0, 1.0, forced=True, torch="2.15.0"), "the two runs differ in torch"),
        ({**run_of(1.0, 1.0), "rows": []}, run_of(1.0, 1.0, forced=True), "uniform_varlen: no time"),
    ],
    ids=["both unforced", "swapped", "two versions of torch", "a missing workload"],
)
def test_runs_that_do_not_belong_together_are_refused(
    native: dict[str, Any], forced: dict[str, Any], said: str, speed: ModuleType
) -> None:
    with pytest.raises(SystemExit, match=said):
        speed.data_of(native, forced)


def test_a_wrong_answer_is_refused(speed: ModuleType) -> None:
    native = run_of(1.0, 1.0)
    native["rows"][0]["verdict"] = {"ok": False}
    with pytest.raises(SystemExit, match="wrong answers"):
        speed.data_of(native, run_of(1.0, 1.0, forced=True))


def test_a_run_in_which_flash_attn_served_our_calls_is_refused(speed: ModuleType) -> None:
    native = run_of(1.0, 1.0)
    native["rows"][0]["served_by"] = "official"
    with pytest.raises(SystemExit, match="FLASH_ATTN_COMPAT_DISABLE_OFFICIAL"):
        speed.data_of(native, run_of(1.0, 1.0, forced=True))


def test_a_wrong_answer_outside_the_table_is_not_the_tables(speed: ModuleType) -> None:
    native = run_of(1.0, 1.0)
    native["rows"].append({**native["rows"][0], "workload": "decode_8x4096_d256", "verdict": {"ok": False}})
    assert speed.data_of(native, run_of(1.0, 1.0, forced=True))["workloads"]
