"""The limits of a GPU for commands that measure: its memory, and launches too long for a display's timer."""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_attn_compat import card
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.card import Limits
from tests.forms.support import driver_stand_in
from verify import bench, compare
from verify.bench_run import Plan
from verify.timing import DeviceLost
from verify.workloads import DECODE, FULL, SMALL, Workload, bytes_of, fitted, of_lengths, visible_scores, workload

GIB = 2.0**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """A GPU of 4 GiB as number 1, which is current; returns the caps that are set."""
    caps: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=4 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: caps.append(given))
    return caps


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_memory_is_capped_so_that_pytorch_raises_before_a_driver_uses_the_hosts(
    device: str, gpu: list[tuple[float, int]]
) -> None:
    assert card.cap_memory(torch.device(device)) == 0.9 * 4 * GIB and gpu == [(0.9, 1)]


def test_a_cpu_has_no_limits(gpu: list[tuple[float, int]]) -> None:
    limits = card.measure_limits(torch.device("cpu"), torch.float32)
    assert limits == card.NO_LIMITS == Limits(math.inf, math.inf) and not gpu


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(driver_stand_in(tmp_path_factory.mktemp("driver")))


@pytest.mark.parametrize(
    ("index", "release", "hip", "expected"),
    [
        (0, "6.8.0-generic", None, False),
        (1, "6.8.0-generic", None, True),
        (0, "5.15.153.1-microsoft-standard-WSL2", None, True),
        (1, "6.8.0-generic", "6.2", False),
    ],
)
def test_a_timer_is_known_from_the_driver_and_below_wsl(
    index: int, release: str, hip: str | None, expected: bool, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = nvrtc.Driver(library)
    monkeypatch.setattr(nvrtc, "driver", lambda: driver)
    monkeypatch.setattr(card, "platform", SimpleNamespace(release=lambda: release))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert card.has_timer(torch.device("cuda", index)) == expected


@pytest.mark.parametrize(("timer", "seconds"), [(True, 0.5), (False, 2.0)])
def test_launches_stay_far_below_two_seconds_where_a_timer_runs(
    timer: bool, seconds: float, gpu: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "has_timer", lambda device: timer)
    monkeypatch.setattr(card, "_speed", lambda device, dtype: 1e12)
    assert card.measure_limits(torch.device("cuda"), torch.float16) == Limits(0.9 * 4 * GIB, seconds * 1e12)


@pytest.mark.parametrize("name", [each.name for each in (*FULL, *DECODE)])
@pytest.mark.parametrize("limits", [Limits(3.6 * GIB, 3e11), Limits(0.5 * GIB, 3e9)], ids=["GTX 1650", "less"])
def test_every_workload_fits_a_small_card_and_says_how_much_of_it_is_left(name: str, limits: Limits) -> None:
    given = next(each for each in (*FULL, *DECODE) if each.name == name)
    found = fitted(given, limits)
    launch = card.count_flops(found.nheads, found.head_dim, visible_scores(found), not found.decode)
    assert bytes_of(found) <= limits.memory and launch <= limits.flops_of_launch
    label, _, share = found.name.partition(" (1/")
    shape = f"decode_{found.batch}x{found.capacity}"
    assert label == re.sub(r"^decode_\d+x\d+", shape, name) and (found == given) == (not share)
    if share:
        ratio = bytes_of(given) / bytes_of(found)
        assert ratio > int(share.rstrip(")")) / 3 and found.nheads == given.nheads and found.head_dim == given.head_dim


def test_a_large_card_is_given_every_workload_whole() -> None:
    limits = Limits(0.9 * 80 * GIB, 2 * 3e14)
    assert [fitted(each, limits) for each in (*FULL, *DECODE)] == [*FULL, *DECODE]


@pytest.mark.parametrize("each", SMALL, ids=lambda each: each.name)
def test_the_estimate_of_a_calls_memory_is_no_less_than_its_tensors(each: Workload) -> None:
    call = each.call("cpu", torch.float16)
    held = sum(x.nbytes for x in (*call.args.values(), call.dout) if isinstance(x, torch.Tensor) and x.dim() > 2)
    assert held <= bytes_of(each)


def test_halves_of_one_long_sequence_are_shorter() -> None:
    (long,) = of_lengths([32768])
    found = fitted(long, Limits(math.inf, 8.0 * 32 * 128 * 0.5 * 8192**2))
    assert found.seqlens_q == found.seqlens_k == (8192,) and found.name == "causal_32768 (1/4)"
    window = workload("window", (16384,), (8, 8), 64, causal=True, window=(1024, 0))
    assert fitted(window, Limits(bytes_of(window) / 2, math.inf)).window == (512, 0)


def test_bench_takes_workloads_that_fit_and_tells_a_device_that_gives_up_at_its_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan([replace(SMALL[0], name="given")], [], "cpu", torch.float32)
    monkeypatch.setattr(bench, "measure_limits", lambda device, dtype: Limits(bytes_of(SMALL[0]) / 2, math.inf))
    assert [each.name for each in bench.on_card(plan).workloads] == ["given (1/2)"]

    def give_up(plan: Plan) -> Plan:
        raise DeviceLost("forward broke this process's use of the GPU")

    monkeypatch.setattr(bench, "on_card", give_up)
    from verify.cli import main

    assert main(["bench", "--only", "cross_short_q", "--rivals", "none"]) == 1
    assert "failed at the first call: forward broke" in " ".join(capsys.readouterr().out.split())


def test_verify_caps_memory_before_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(compare, "cap_memory", lambda device: done.append(device.type))
    monkeypatch.setattr(compare, "run", lambda *given: done.append("run") or iter(()))
    asked = compare.Asked(None, ["chunked"], ["cpu"], True, ["head_dim 52"], True)
    assert list(compare.steps(0, asked)) == [] and done == ["cpu", "run"]
