"""Tuning results, and cards without tensor cores: who serves a call, and what users are told."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import (
    backend_counts,
    doctor,
    explain,
    flash_attn_func,
    flash_attn_with_kvcache,
    reset_backend_counts,
    settings,
    use_backend,
)
from flash_attn_compat.backends import BACKENDS, chunked
from flash_attn_compat.backends.fused import backward
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import KernelError
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.tuning import tuned
from flash_attn_compat.backends.fused.tuning.tuned import Card
from flash_attn_compat.core.features import Feature, Traits, lacks_tensor_cores
from flash_attn_compat.dispatch import call_cache, choice
from tests import paper_gpu
from tests.forms.inputs import randn
from tests.kernels.fused_on_cpu import LaunchRecord

GPU = "Tesla T4"
Times = dict[tuple[str, int, str, bool], dict[str, float]]
SLOW, FAST = {"fused": 2.0, "torch_efficient": 1.0}, {"fused": 1.0, "torch_efficient": 2.0}


launches = paper_gpu.fixture(model=GPU, others=("torch_efficient",))
pytestmark = pytest.mark.usefixtures("launches")


def known(*times: Times, gpu: str = GPU) -> None:
    assert tuned.store_card(Card(gpu, "torch 2", {key: each for one in times for key, each in one.items()}))
    call_cache.forget()


def timed(case: str, milliseconds: dict[str, float], training: bool = False, head_dim: int = 64) -> Times:
    return {(case, head_dim, "float16", training): milliseconds}


def qkv(dim: int = 64, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (randn(2, 40, 4, dim, seed=seed, dtype=torch.float16) for seed in range(3))
    return q.requires_grad_(grad), k, v


def server(function: Any, *args: Any, **options: Any) -> str | None:
    return explain(function, *args, **options).backend


# ---- who serves


def test_the_faster_backend_serves_timed_calls_only() -> None:
    known(timed("full", SLOW), timed("causal", SLOW, training=True), timed("causal", FAST), timed("ALiBi", FAST))
    assert server(flash_attn_func, *qkv()) == "torch_efficient"
    assert server(flash_attn_func, *qkv(dim=56)) == "torch_efficient", "which takes kernels of 64, too"
    assert server(flash_attn_func, *qkv(dim=40)) == "fused"
    assert server(flash_attn_func, *qkv(grad=True)) == "fused"
    assert server(flash_attn_func, *qkv(), causal=True) == "fused"
    assert server(flash_attn_func, *qkv(grad=True), causal=True) == "torch_efficient"
    assert server(flash_attn_func, *qkv(), causal=True, softcap=3.0) == "fused"
    known(timed("causal", SLOW))
    assert server(flash_attn_func, *qkv(), causal=True) == "torch_efficient", "what is newer counts"
    assert server(flash_attn_func, *qkv()) == "torch_efficient", "the rest stays"


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("ALiBi", {"alibi_slopes": torch.ones(4), "causal": True}),
        ("softcap", {"softcap": 3.0}),
        ("window", {"window_size": (7, 0)}),
        ("decode", {"cache_seqlens": torch.tensor([30, 40], dtype=torch.int32)}),
        ("pages", {"cache_seqlens": torch.tensor([30, 40], dtype=torch.int32), "block_table": True}),
    ],
)
def test_calls_of_every_kind_can_be_left_to_plain_pytorch(case: str, options: dict[str, Any]) -> None:
    """As on cards without tensor cores."""
    function = flash_attn_with_kvcache if "cache_seqlens" in options else flash_attn_func
    if "block_table" in options:
        options = options | {"block_table": torch.arange(2, dtype=torch.int32)[:, None]}
    assert server(function, *qkv(), **options) == "fused"
    known(timed(case, {"fused": 2.0, "chunked": 1.0}))
    assert server(function, *qkv(), **options) in ("sdpa", "chunked")  # a GPU has no sdpa


def test_a_call_that_the_faster_backend_refuses_stays() -> None:
    known(timed("causal", SLOW))
    q, k, v = qkv()
    assert server(flash_attn_func, q, k[:, :20], v[:, :20], causal=True) == "fused"
    assert server(flash_attn_func, q, k, v, window_size=(-1, 3)) == "fused"
    order = list(explain(flash_attn_func, q, k, v, causal=True).reasons)
    assert order.index("fused") == order.index("torch_efficient") + 1


def test_timed_backends_are_sorted_among_themselves_and_the_others_stay() -> None:
    traits = Traits("cuda", (8, 0), torch.float16, 64, 64, "=", int(Feature.CAUSAL | Feature.BACKWARD), GPU)

    def order() -> list[str]:
        return [backend.name for backend in choice._ordered(traits)][:4]

    assert order() == ["official", "torch_flash", "fused", "torch_efficient"]
    known(timed("causal", {"fused": 1.0, "torch_flash": 2.0}, training=True))
    assert order() == ["official", "fused", "torch_flash", "torch_efficient"]
    known(timed("causal", {"fused": 1.0, "torch_flash": 2.0, "official": 3.0}, training=True))
    assert order() == ["fused", "torch_flash", "official", "torch_efficient"]
    known(timed("causal", {"fused": 2.0, "torch_efficient": 1.0}, training=True))
    assert order() == ["official", "torch_flash", "torch_efficient", "fused"]


def test_the_user_can_have_a_slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    known(timed("full", SLOW))
    with use_backend("fused"):
        assert server(flash_attn_func, *qkv()) == "fused"
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "1")
    assert server(flash_attn_func, *qkv()) == "fused"


def test_a_verdict_is_one_models_and_not_its_capabilitys(monkeypatch: pytest.MonkeyPatch) -> None:
    known(timed("full", SLOW), gpu="GeForce RTX 2080")
    assert server(flash_attn_func, *qkv()) == "fused"
    monkeypatch.setattr(settings, "gpu", lambda device: "GeForce RTX 2080")
    assert server(flash_attn_func, *qkv()) == "torch_efficient"


# ---- steps of training


def test_steps_whose_gradients_go_elsewhere_decide_once_and_raise_nothing(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether another backend is faster at them or our kernels have failed."""
    decided: list[bool] = []
    decide, forget = choice._decide, call_cache.forget
    monkeypatch.setattr(choice, "_decide", lambda *given: decided.append(True) or decide(*given))
    forgotten: list[bool] = []
    monkeypatch.setattr(call_cache, "forget", lambda: forgotten.append(True) or forget())

    def steps(count: int) -> None:
        decided.clear(), forgotten.clear()
        for _ in range(count):
            q, k, v = qkv(grad=True)
            flash_attn_func(q, k, v, causal=True).sum().backward()

    known(timed("causal", SLOW, training=True))
    steps(1)
    steps(6)
    assert not decided and not forgotten and not launches.seen
    tuned._cards.clear()
    tuned.store_card(Card(GPU, "", timed("causal", FAST, training=True)))
    forget()

    raised: list[bool] = []

    def fail(*given: Any) -> None:
        raised.append(True)
        raise KernelError("it spills")

    monkeypatch.setattr(backward, "prepare", fail)
    with pytest.warns(RuntimeWarning, match="it spills"):
        steps(1)
    steps(6)
    assert raised == [True] and not forgotten and set(launches.entries) == {"forward"}
    assert len(launches.entries) == 7, "the forward is still ours"


# ---- what is kept


def card() -> Card:
    tiles = {("forward", 128, "float16"): Tile(64, 8, 1, 1), ("dkdv", 64, "float16"): Tile(64, 4, 1, 2)}
    return Card(GPU, "torch 2.11", timed("causal", FAST) | timed("full", SLOW, training=True), tiles)


def first(results: Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(itertools.islice(results.items(), 1))


def test_later_processes_decide_alike(launches: LaunchRecord) -> None:
    assert tuned.store_card(card()) and len(launches.files) == 1
    tuned._cards.clear()
    assert tuned.find_card(GPU) == card()
    tuned.store_card(Card(GPU, "torch 2.12", timed("causal", SLOW), first(card().tiles)))
    tuned._cards.clear()
    both = tuned.find_card(GPU)
    assert both is not None and {case: times for (case, *_), times in both.times.items()} == {
        "causal": SLOW,
        "full": SLOW,
    }
    assert both.tiles == card().tiles


ROW = json.loads(tuned.to_row(card()))
TIMES, TILE = ROW["times"][0], ROW["tiles"][0]


def changed(times: dict[str, Any] | None = None, tile: dict[int, Any] | None = None, **row: Any) -> bytes:
    """The row, but for these fields of it, of its first times and of its first tile (by its place)."""
    tiles = [(tile or {}).get(place, value) for place, value in enumerate(TILE)]
    return json.dumps(ROW | {"times": [TIMES | (times or {})], "tiles": [tiles]} | row).encode()


BROKEN = {
    "no JSON": b"\xff{",
    "no object": b"[1, 2]",
    "a word": b'"gpu"',
    "another field": changed({"other": 2.0}),
    "a field missing": json.dumps({name: value for name, value in ROW.items() if name != "tiles"}).encode(),
    "no figures": changed({"milliseconds": {"fused": "fast"}}),
    "a list of figures": changed({"milliseconds": [1.0]}),
    "nothing of ours": changed({"milliseconds": {"sdpa": 1.0}}),
    "a figure of nothing": changed({"milliseconds": {"fused": 1.0, "sdpa": 0}}),
    "a figure that is none": changed({"milliseconds": {"fused": float("nan")}}),
    "an infinite figure": changed({"milliseconds": {"fused": float("inf")}}),
    "a figure of 400 digits": changed({"milliseconds": {"fused": 10**400}}),
    "a figure of 10,000 digits": changed().replace(b'"fused": 1.0', b'"fused": ' + b"9" * 10_000),
    "a figure that is true": changed({"milliseconds": {"fused": True}}),
    "a case that is a list": changed({"case": ["causal"]}),
    "a dtype that is an object": changed({"dtype": {}}),
    "words for whether it is training": changed({"training": "yes"}),
    "times that are no rows": changed(times=None).replace(b'"times": [', b'"times": [7, '),
    "no tile": changed(tile={3: [64, 4]}),
    "a tile of words": changed(tile={3: ["64", 4, 1, 1]}),
    "a tile of 400 digits": changed(tile={3: [10**400, 4, 1, 1]}),
    "a kernel that is a list": changed(tile={0: ["forward"]}),
    "tiles that are a number": changed(tiles=7),
    "a model that is a list": changed(gpu=[GPU]),
    "a model that is an object": changed(gpu={GPU: 1}),
    "escapes in the model": changed(gpu=f"\x1b]0;owned\x07{GPU}"),
    "escapes in the versions": changed(made_with="\x1b[2Jtorch"),
    "an escape in a case": changed({"case": "\x1b[31mcausal"}),
    "half a surrogate": changed(made_with="\ud800"),
    "deep nesting": b"[" * 200_000,
    "deep nesting within": changed(made_with=0).replace(b'"made_with": 0', b'"made_with": ' + b'{"a":' * 100_000),
    "of another version": json.dumps({"fused": 1.0, "rival": "torch_efficient", "other": 2.0}).encode(),
}


def test_a_row_keeps_a_tile_as_numbers_in_order_so_that_rows_of_earlier_versions_load() -> None:
    numbers = [32, 8, 1, 1, True, False, True, 1, 0]
    row = {"gpu": GPU, "made_with": "torch 2", "times": [], "tiles": [["dkdv", 160, "float16", numbers]]}
    tile = Tile(
        streamed_rows=32,
        warps=8,
        mma_m=1,
        min_blocks=1,
        qk_in_regs=True,
        vo_in_regs=False,
        cp_async=True,
        split_n=1,
        split_k=0,
    )
    assert tuned.from_row(json.dumps(row)).tiles == {("dkdv", 160, "float16"): tile}
    row["tiles"] = [["dkdv", 160, "float16", [*numbers, False, 1, False, False, 1]]]  # with the fields that came later
    row["state"] = "clock 1,200 MHz"
    assert json.loads(tuned.to_row(tuned.from_row(json.dumps(row)))) == row


def test_the_row_that_the_broken_ones_are_made_of_is_a_verdict() -> None:
    assert tuned.from_row(changed().decode()) == card()._replace(times=first(card().times), tiles=first(card().tiles))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_costs_no_other_row_its_verdict(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuned, "_SHIPPED", tmp_path / "cards.jsonl")
    rows = BROKEN[name].decode(errors="replace"), json.dumps(ROW), BROKEN[name].decode(errors="replace")
    tuned._SHIPPED.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(tuned, "_read_shipped", tuned._read_shipped.__wrapped__)
    assert tuned.find_card(GPU) == card()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_no_verdict_and_no_error(name: str, launches: LaunchRecord) -> None:
    launches.files[tuned._file_name(GPU)] = BROKEN[name]
    assert tuned.find_card(GPU) is None
    assert server(flash_attn_func, *qkv()) == "fused"
    flash_attn_func(*qkv())
    assert tuned.store_card(card()) and tuned.find_card(GPU) == card(), "which tune writes anew"


def test_an_unwritable_result_counts_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned.kernel_files, "write", lambda name, payload: False)
    assert not tuned.store_card(card()) and tuned.find_card(GPU) == card()


def test_every_shipped_row_is_a_card_and_adding_one_is_all_that_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = tuned._SHIPPED.read_text().splitlines()
    timed_by = {name for row in tuned._read_shipped().values() for times in row.times.values() for name in times}
    assert timed_by <= {backend.name for backend in BACKENDS}
    assert [tuned.from_row(row).gpu for row in rows] == list(tuned._read_shipped())
    monkeypatch.setattr(tuned, "_SHIPPED", tmp_path / "cards.jsonl")
    tuned._SHIPPED.write_text("".join(f"{row}\n" for row in (*rows, tuned.to_row(card()))))
    monkeypatch.setattr(tuned, "_read_shipped", tuned._read_shipped.__wrapped__)
    assert tuned.find_card(GPU) == card()
    tuned.store_card(Card(GPU, "torch 2.12", timed("causal", SLOW)))
    mine = tuned.find_card(GPU)
    assert mine is not None and next(iter(mine.times.values())) == SLOW and mine.tiles == card().tiles


def test_nothing_is_timed_at_a_users_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(*given: Any, **options: Any) -> None:
        raise AssertionError("somebody looks at the time")

    for name in ("perf_counter", "perf_counter_ns", "monotonic", "time"):
        monkeypatch.setattr(time, name, clock)
    monkeypatch.setattr(torch.cuda, "Event", clock)
    q, k, v = qkv(grad=True)
    flash_attn_func(q, k, v).sum().backward()
    assert backend_counts() == {"fused": 1}


# ---------------------------------------------------------------- cards of capability 7.5 without tensor cores

GTX = "NVIDIA GeForce GTX 1650"


@pytest.fixture
def gtx(launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned._warn.cache_clear()
    paper_gpu.set_model(monkeypatch, GTX)


on_gtx = pytest.mark.usefixtures("gtx")


def call(*, length: int = 20) -> None:
    q, k, v = (randn(1, length, 2, 64, seed=seed, dtype=torch.float16) for seed in range(3))
    flash_attn_func(q, k, v)


def find_order(gpu: str, features: int = Feature.CAUSAL, dtype: torch.dtype = torch.float16) -> list[str]:
    traits = Traits("cuda", (7, 5), dtype, 64, 64, "=", int(features), gpu)
    return [backend.name for backend in choice._ordered(traits)]


@pytest.mark.parametrize(
    "gpu",
    [
        "NVIDIA GeForce GTX 1660 Ti", "GeForce GTX 1650", "GeForce GTX 1650 with Max-Q Design", "GTX 1660 SUPER",
        "NVIDIA GeForce GTX 1630", "NVIDIA CMP 30HX", "GeForce MX450", "NVIDIA GeForce MX550", "T400 4GB", "T400E",
        "NVIDIA T500", "NVIDIA T550 Laptop GTX", "NVIDIA T600", "NVIDIA T1000 8GB", "T1200 Laptop GTX", "Quadro T1000",
        "Quadro T2000 with Max-Q Design", "GeForce GTX 1650 as 7.5",
    ],
)  # fmt: skip
def test_cards_of_tu116_and_tu117_have_no_tensor_cores(gpu: str) -> None:
    assert lacks_tensor_cores(gpu)


@pytest.mark.parametrize(
    "gpu",
    [
        GPU, "NVIDIA T4G", "Tesla T40 24GB", "Tesla T10", "GeForce RTX 2060", "NVIDIA GeForce RTX 2080 Ti", "TITAN RTX",
        "Quadro RTX 4000", "Quadro RTX 6000", "NVIDIA CMP 40HX", "GeForce GTX 1060 6GB", "NVIDIA GeForce MX350",
        "NVIDIA GeForce RTX 2050", "NVIDIA RTX A2000", "NVIDIA A10", "NVIDIA H200 as 7.5", None,
    ],
)  # fmt: skip
def test_other_cards_are_not_taken_for_such(gpu: str | None) -> None:
    assert not lacks_tensor_cores(gpu)


@on_gtx
@pytest.mark.parametrize(("variable", "backend"), [(None, "chunked"), ("1", "fused")])
def test_a_card_without_them_is_told_of_tune_once_and_not_after_it(
    variable: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", variable)
    reset_backend_counts()
    with pytest.warns(RuntimeWarning, match=f"{GTX} has no tensor cores.*flash-attn-compat tune"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(length=30)
        tuned._warn.cache_clear()
        tuned.store_card(Card(GTX, ""))
        call(length=40)
    assert backend_counts() == {backend: 3}


@on_gtx
def test_explain_says_that_the_card_has_no_tensor_cores() -> None:
    q = randn(1, 20, 2, 64, dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="half precision go to the backend chunked, which multiplies in fp32"):
        explain(flash_attn_func, q, q, q)


@on_gtx
@pytest.mark.parametrize("gpu", [GPU, "NVIDIA H200 as 7.5"])
def test_a_card_with_tensor_cores_is_told_nothing(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paper_gpu.set_model(monkeypatch, gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


@on_gtx
@pytest.mark.parametrize(
    ("features", "dtype", "variable", "first"),
    [
        (Feature.CAUSAL | Feature.BACKWARD, torch.float16, None, "chunked"),
        (Feature.CAUSAL, torch.bfloat16, None, "chunked"),
        (Feature.CAUSAL, torch.float16, "0", "chunked"),
        (Feature.APPEND | Feature.CAUSAL, torch.float16, None, "fused"),
        (Feature.SEQUSED_K, torch.float16, None, "fused"),
        (Feature.CAUSAL, torch.float16, "1", "fused"),
    ],
)
@pytest.mark.parametrize("gpu", [GPU, GTX])
def test_without_tensor_cores_chunked_goes_first_but_for_steps_over_a_cache(
    gpu: str, features: int, dtype: torch.dtype, variable: str | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", variable)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = find_order(gpu, features, dtype)
    ours = found.index("chunked" if first == "chunked" and gpu == GTX else "fused")
    assert all(ours < found.index(name) for name in ("torch_efficient", "sdpa"))
    assert ["use float32 there" in str(each.message) for each in told] == [True] * (first == "chunked" and gpu == GTX)


@on_gtx
def test_tuning_results_come_before_the_estimate() -> None:
    found = {"fused": 2.0, "chunked": 3.0, "torch_efficient": 1.0, "sdpa": 4.0}
    tuned.store_card(Card(GTX, "", timed("causal", found)))
    assert [name for name in find_order(GTX) if name in found] == ["torch_efficient", "fused", "chunked", "sdpa"]


@on_gtx
@pytest.mark.parametrize(("gpu", "expected"), [(GPU, torch.float16), (GTX, torch.float32)])
def test_chunked_multiplies_in_fp32_on_a_card_without_tensor_cores(
    gpu: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_BMM_HAS_OUT_DTYPE", True)
    paper_gpu.set_model(monkeypatch, gpu)
    q: Any = SimpleNamespace(is_cuda=True, dtype=torch.float16, device=torch.device("cuda", 1))
    assert chunked._choose_operand_dtype(q) == expected


@on_gtx
def test_doctor_reports_missing_tensor_cores_and_the_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    paper_gpu.build_for(monkeypatch)
    first, *others = doctor.describe_kernels(torch.device("cuda", 0))
    assert "for sm_75 by NVRTC 13.0" in first
    assert "no tensor cores: use float32" in others[0] and "not tuned" in others[1] and len(others) == 2
    times = timed("causal", {"fused": 2.0, "chunked": 1.0}, training=True)
    tuned.store_card(Card(GTX, "torch 2.11", times))
    assert doctor.describe_kernels(torch.device("cuda", 0))[2:] == [
        "tuned with torch 2.11",
        "causal, head_dim 64, float16, training  chunked 1 ms, fused 2 ms",
    ]
    paper_gpu.set_model(monkeypatch, GPU)
    assert not any("float32" in line for line in doctor.describe_kernels(torch.device("cuda", 0)))
    monkeypatch.setattr(nvrtc, "decline_reason", lambda: "NVRTC cannot be used")
    assert doctor.describe_kernels(torch.device("cuda", 0)) == ["none: NVRTC cannot be used"]
