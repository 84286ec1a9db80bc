"""The benchmarks on small problems, and README's speed section, which .ci/speed.py fills from two runs."""

from __future__ import annotations

import importlib.util
import json
import math
import pkgutil
import re
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import benchmarks.__main__
from benchmarks import cpu, end_to_end, head_dims, host_time, sdpa, tile_sweep, vllm_serving
from benchmarks.fine_tuning import largest_distance
from benchmarks.runner import Contest, forward_only, make_parser, relative_difference, run
from flash_attn_compat import BackendNotSupported, flash_attn_func, flash_attn_interface, settings
from tests.forms.support import load_file
from tests.sdpa import originals
from verify.bench_run import Row
from verify.errors import NotSupported
from verify.timing import Job, Timing
from verify.workloads import FULL


def test_the_list_names_every_benchmark_and_verifys(capsys):
    files = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - {"__main__", "runner"}
    assert {*benchmarks.__main__.PROGRAMS} == {*files, "bench"}
    assert benchmarks.__main__.main([]) == 0 and benchmarks.__main__.main(["nothing"]) == 2
    shown = capsys.readouterr().out
    assert "\nend_to_end" in shown and "verify bench" in shown


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_the_benchmark_of_vllm_says_at_once_that_vllm_is_not_installed(capsys):
    with pytest.raises(SystemExit, match="2"):
        vllm_serving.main([])
    assert "vLLM is not installed here" in capsys.readouterr().err


def test_a_benchmarks_name_runs_its_module_with_its_options(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest"])
    for name, said in (("cpu", "--threads"), ("bench", "--rivals"), ("kernel_tiles", "--kernels")):
        with pytest.raises(SystemExit, match="0"):
            benchmarks.__main__.main([name, "--help"])
        assert said in capsys.readouterr().out


# ---- the runner ------------------------------------------------------------------------------------------------------


def give(*values: float) -> Job:
    return Job(lambda: torch.tensor(values))


def two(ours: Job, theirs: Job):
    return forward_only({"ours": ours, "theirs": theirs})


def ran(tmp_path, *contests: Contest, clock=None) -> tuple[int, list[dict]]:
    """The exit code, and the rows that are saved."""
    saved = tmp_path / "a.json"
    options = make_parser("test", "A test.").parse_args(["--repeats", "1", "--json", str(saved)])
    return run("test", contests, options, "cpu", clock), json.loads(saved.read_text())["rows"]


def test_a_contest_has_each_contestants_time_and_the_rivals_over_ours(tmp_path, capsys):
    times = {"ours": Timing(2.0, 2.0, 2.0, 1), "theirs": Timing(3.0, 3.0, 3.0, 1)}
    contest = Contest("one", lambda: two(give(1.0), give(1.0)), torch.float32)
    code, rows = ran(tmp_path, contest, clock=lambda jobs: times if jobs else {})
    assert code == 0
    found = [(row["contestant"], row["ours"], row["forward"]["median_ms"]) for row in rows]
    assert found == [("ours", True, 2.0), ("theirs", False, 3.0)]
    assert "geometric mean speed-up over theirs: forward 1.500 (1 workload)" in capsys.readouterr().out


def test_contestants_that_do_not_agree_or_fail_or_are_too_slow_give_exit_code_1(tmp_path):
    def broken():
        raise ValueError("planted")

    contests = {
        "other": Contest("other", lambda: two(give(1.0), give(1.1)), torch.float16),
        "fewer": Contest("fewer", lambda: two(give(1.0), Job(lambda: None)), torch.float16),
        "another of a list": Contest(
            "another of a list", lambda: two(give(1.0), Job(lambda: [torch.ones(1) * 2])), torch.half
        ),
        "broken": Contest("broken", lambda: two(Job(broken), give(1.0)), torch.float16),
        "no tensors": Contest("no tensors", broken),
        "slow": Contest("slow", lambda: two(give(1.0), give(1.0)), at_least={"theirs": 1e6}),
        "right": Contest("right", lambda: two(give(1.0), give(1.001)), torch.float16),
    }
    for name, contest in contests.items():
        code, rows = ran(tmp_path, contest)
        mine, *others = rows
        assert code == (name != "right"), name
        assert (mine["failed"] or not mine["verdict"]["ok"]) is (name != "right")
        assert not any(row["failed"] for row in others)
        assert mine["reason"] == {"broken": "ValueError: planted", "no tensors": "ValueError: planted"}.get(
            name, mine["reason"]
        )


def test_no_other_thread_runs_during_a_measurement(tmp_path):
    seen, before = [], {*threading.enumerate()}  # of which some may end meanwhile
    watch = Job(lambda: seen.append({*threading.enumerate()} - before))
    assert ran(tmp_path, Contest("watched", lambda: forward_only({"ours": watch})))[0] == 0
    assert seen and not any(seen)


def test_a_nan_agrees_with_a_nan_alone():
    nan, one = torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, 1.0])
    assert (
        relative_difference(nan, nan) == 0
        and relative_difference(nan, one) == relative_difference(one, nan) == math.inf
    )


# ---- the benchmarks --------------------------------------------------------------------------------------------------


def test_each_program_runs_by_every_implementation_and_agrees(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "1")
    saved = tmp_path / "figures.json"
    command = ["--tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "1"]
    assert end_to_end.main([*command, "--json", str(saved)]) == 0
    rows = json.loads(saved.read_text())["rows"]
    assert [*dict.fromkeys(row["workload"] for row in rows)] == [*end_to_end.PROGRAMS]
    for row in rows:
        if row["reason"].endswith("is not installed"):
            continue
        assert row["verdict"]["ok"] and row["forward"]["median_ms"] > 0 and row["memory_mib"] > 0
        assert row["served_by"] or row["contestant"] != "ours"


@originals.needs_grouped_heads
@pytest.mark.parametrize("name", ["BERT, padded", "Swin", "8 padded prompts, a step"])
def test_the_operators_shapes_run_with_and_without_our_kernels(name, tmp_path):
    saved = tmp_path / "a.json"
    command = ["--only", name, "--longest", "16", "--device", "cpu", "--dtype", "bfloat16", "--repeats", "1"]
    assert sdpa.main([*command, "--json", str(saved)]) == 0
    rows = json.loads(saved.read_text())["rows"]
    assert {row["contestant"] for row in rows} == {"with", "without"} and all(row["memory_mib"] for row in rows)


def test_replayed_graphs_were_captured_with_our_kernels(monkeypatch):
    captured = []

    def capture(job, device):
        captured.append(job)
        result = job.run()
        return (lambda: result.add_(1)), result

    monkeypatch.setattr(sdpa, "capture", capture)
    q = torch.randn(1, 3, 2, 8)
    ours, other = Job(lambda: flash_attn_func(q, q, q)), Job(lambda: q * 0)
    made = sdpa.capture_all({"with": {"forward": ours}, "without": {"forward": other}}, "cpu")
    assert captured == [ours, other]
    assert torch.equal(made["without"]["forward"].run(), torch.ones_like(q))
    assert torch.equal(made["with"]["forward"].run(), flash_attn_func(q, q, q) + 1)
    with pytest.raises(NotSupported, match="left alone"):
        sdpa.capture_all({"with": {"forward": other}, "without": {"forward": other}}, "cpu")


def test_on_a_cpu_packing_chunked_and_the_hosts_time_have_bounds():
    contests = [*cpu.contests()]
    names = [each.name for each in contests]
    assert "skewed float32" in names and len(names) == 17 == len({*names})
    assert sum("host" in name for name in names) == 6 and sum("chunked" in name for name in names) == 2
    assert all(each.at_least for each in contests)


def test_head_dims_are_timed_in_each_dtype_and_compared_between_them():
    names = [each.name for each in head_dims.contests([40], ["float16", "bfloat16"], [1024], "cpu")]
    assert len(names) == 4 == len({*names})
    took = dict(zip([name for name in names if "full" in name], (1.0, 1.2)))
    rows = [Row(name, "fused", True, forward=Timing(ms, ms, ms, 1)) for name, ms in took.items()]
    assert [*head_dims.compare_bf16(rows)] == ["forward, bf16 / fp16: 1.200, worst 1.200"]


def test_the_hosts_time_is_that_of_the_fastest_batch(monkeypatch):
    monkeypatch.setattr(host_time, "BATCHES", 3)
    now, waits = [0.0], [0.0, *[0.02] * 10, *[0.001] * 10, *[0.02] * 10]

    def work():
        now[0] += waits.pop(0)

    assert host_time.milliseconds(Job(work), "cpu", lambda: now[0]) == pytest.approx(1.0) and not waits


def test_contestants_of_a_packed_call_take_turns_and_get_their_medians():
    now, order, takes = [0.0], [], {"one": [0.001] * 11 + [0.003] * 11 + [0.002] * 11, "other": [0.005] * 33}

    def job(name: str) -> Job:
        def work():
            order.append(name)
            now[0] += takes[name].pop(0)

        return Job(work)

    found = host_time.time_in_turns({name: job(name) for name in takes}, "cpu", 3, lambda: now[0])
    assert found["one"].median_ms == pytest.approx(2.0) and found["other"].median_ms == pytest.approx(5.0)
    assert order == (["one"] * 11 + ["other"] * 11) * 3


@pytest.mark.parametrize(("error", "code"), [(BackendNotSupported("declined"), 0), (ValueError("broken"), 1)])
def test_packed_calls_are_shown_as_ratios_to_flash_attn_and_a_failure_gives_exit_code_1(
    monkeypatch, capsys, error, code
):
    def fail():
        raise error

    jobs = {"default": give(1.0), "fused": Job(fail), host_time.FLASH_ATTN: give(1.0)}
    monkeypatch.setattr(host_time, "packed_jobs", lambda device: {"packed": jobs})
    timings = {"default": Timing(0.06, 0.05, 0.07, 3), host_time.FLASH_ATTN: Timing(0.05, 0.05, 0.05, 3)}
    monkeypatch.setattr(host_time, "time_in_turns", lambda jobs, device, turns: timings)
    assert host_time.print_packed("cpu", 3) == code
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "default 60 50 to 70 1.20" in shown and f"fused {type(error).__name__}: {error}" in shown


def test_a_contestant_sees_its_capability_and_no_installed_flash_attn(monkeypatch):
    monkeypatch.delenv(settings.CAPABILITY, raising=False)
    with host_time.served_as(None, "7.5"):
        assert settings.forced_capability() == (7, 5) and settings.is_on(settings.DISABLE_OFFICIAL)
    with host_time.served_as("chunked", None):
        assert settings.forced_backend() == "chunked" and settings.forced_capability() is None


def test_every_packed_call_runs_on_a_cpu_by_its_name():
    calls = host_time.make_calls("cpu", flash_attn_interface)
    assert all(calls[name]() is not None for name in host_time.PACKED)


def test_loss_curves_are_held_against_each_other_in_means_of_ten_steps():
    one = [2.0] * 20
    assert largest_distance(one, one) == 0
    assert largest_distance(one, [*one[:10], 3.0, *one[11:]]) == pytest.approx(0.05)


# ---- vLLM


def test_answers_of_two_engines_are_equal_up_to_a_tie() -> None:
    """The first pair is equal, the second parts at a tie, the third at no tie. An unranked token is no tie either."""
    sure, close = {"1": -0.1, "2": -3.0}, {"1": -0.70, "2": -0.69}
    ours = {"tokens": [[1, 1], [1, 1], [1, 2]], "logprobs": [[sure, sure], [sure, close], [sure, sure]]}
    theirs = {"tokens": [[1, 1], [1, 2], [1, 1]], "logprobs": [[sure, sure], [sure, close], [sure, sure]]}
    found = vllm_serving.compare(ours, theirs, 0.03)
    assert (found["equal"], found["ties"], found["differences"], found["widest"]) == (1, 1, 1, 0.0)
    assert found["first"] == [{"prompt": 2, "step": 1, "gap": pytest.approx(2.9)}]
    ours = {"tokens": [[1]], "logprobs": [[{"1": -0.1}]]}
    unranked = {"tokens": [[2]], "logprobs": [[{"2": -0.1, "1": -0.1}]]}
    assert vllm_serving.compare(ours, unranked, 0.03)["differences"] == 1


def test_engines_find_the_plugin_and_only_ours_counts_as_turing(tmp_path: Path) -> None:
    vllm_serving.write_entry_point(tmp_path)
    ours, theirs = (vllm_serving.environment(job, tmp_path) for job in ({}, {"backend": "TRITON_ATTN"}))
    assert ours["FLASH_ATTN_COMPAT_CAPABILITY"] == "7.5" and "FLASH_ATTN_COMPAT_CAPABILITY" not in theirs
    assert ours["PYTHONPATH"].startswith(str(tmp_path / "entry_point"))


def test_prompts_have_random_lengths_and_half_share_a_prefix() -> None:
    prompts = vllm_serving.random_prompts()
    assert len(prompts) >= 200 and len({len(prompt) for prompt in prompts}) > 100
    assert len({tuple(prompt[:96]) for prompt in prompts[1::2]}) == 1 and max(map(len, prompts)) < 1024 - 12


def test_every_tile_of_the_sweep_is_a_variant_that_fits_turings_shared_memory() -> None:
    for shape in tile_sweep.SHAPES:
        for variant in tile_sweep.variants_of(shape, 75):
            blocks = dict(variant.macros).get("MIN_BLOCKS", 1)
            assert variant.shared * blocks <= 65536, (shape, variant)


# ---------------------------------------------------------------- README's speed section

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


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"verdict": {"ok": False}}, "wrong answers"), ({"served_by": "official"}, "FLASH_ATTN_COMPAT_DISABLE_OFFICIAL")],
)
def test_a_wrong_answer_and_calls_that_flash_attn_served_are_refused(
    fields: dict[str, Any], said: str, speed: ModuleType
) -> None:
    native = run_of(1.0, 1.0)
    native["rows"][0] |= fields
    with pytest.raises(SystemExit, match=said):
        speed.data_of(native, run_of(1.0, 1.0, forced=True))


def test_a_wrong_answer_outside_the_table_is_not_the_tables(speed: ModuleType) -> None:
    native = run_of(1.0, 1.0)
    native["rows"].append({**native["rows"][0], "workload": "decode_8x4096_d256", "verdict": {"ok": False}})
    assert speed.data_of(native, run_of(1.0, 1.0, forced=True))["workloads"]
