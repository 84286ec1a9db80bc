"""Where tensors become addresses: the arguments of kernels, and refusals before a launch."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_compat import (
    backend_counts,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    reset_backend_counts,
    use_backend,
)
from flash_attn_compat.backends import KernelsFailed
from flash_attn_compat.backends.fused import forward
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, Kind, Sizes
from flash_attn_compat.backends.fused.launching import launcher, layouts, workspaces
from flash_attn_compat.core import cuda_capture, torch_state
from flash_attn_compat.core.arguments import call_of, checked_call
from flash_attn_compat.core.inputs import CacheInputs, DenseInputs, Options
from flash_attn_compat.dispatch import call_cache
from tests import paper_gpu
from tests.forms.inputs import cumulative, randn
from tests.forms.kinds import Wrapper
from tests.kernels import fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord

HALF = torch.float16


launches = paper_gpu.fixture()


def half(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed, dtype=HALF)


# ---- addresses


def freed(size: int) -> Tensor:
    tensor = half(size)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("tensor", [torch.zeros(8), torch.zeros(8, dtype=HALF, device="meta")], ids=["dtype", "device"])
@pytest.mark.usefixtures("launches")
def test_no_plan_is_made_for_another_dtype_or_device(tensor: Tensor) -> None:
    q, other = half(1, 1, 1, 8), tensor.view(1, 1, 1, 8)
    with pytest.raises(RuntimeError, match=rf"v must be torch.float16 on cpu, got {other.dtype} on {other.device}"):
        launcher.Plan(checked_call(DenseInputs(q, q, q))._replace(v=other), KIND, {}).load()


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(7, dtype=HALF), torch.zeros(16, dtype=HALF)[9:], freed(8)],
    ids=["too small", "too small behind its offset", "freed"],
)
@pytest.mark.usefixtures("launches")
def test_an_address_of_too_little_memory_is_refused(tensor: Tensor) -> None:
    q = half(1, 1, 1, 8)
    plan = launcher.Plan(checked_call(DenseInputs(q, q, q)), KIND, {}).load()
    with pytest.raises(RuntimeError, match=r"q must have 16 bytes .*shape"):
        plan.run(DenseInputs(tensor, q, q))


KIND = Kind(75, FP16, Sizes(64))
WITHOUT_MEMORY = {"a wrapper": Wrapper, "a fake": lambda tensor: FakeTensorMode().from_tensor(tensor)}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("what", WITHOUT_MEMORY)
@pytest.mark.parametrize("name", "qkv")
def test_a_tensor_without_memory_is_never_launched(name: str, what: str, launches: LaunchRecord) -> None:
    q = half(1, 90, 4, 64)
    plan = launcher.Plan(checked_call(DenseInputs(q, q, q)), KIND, {})
    plan.add_output("out", q.shape, HALF)
    plan.add_launch(variants.forward(KIND), 1)
    plan.load()
    given = {"q": q, "k": q, "v": q}
    plan.run(DenseInputs(**given))
    with pytest.raises(RuntimeError, match=rf"{name} must be a tensor with memory of its own; got (W|F)"):
        plan.run(DenseInputs(**given | {name: WITHOUT_MEMORY[what](q)}))
    assert launches.entries == ["forward"]


def test_outputs_have_memory_under_a_fake_mode_too(launches: LaunchRecord) -> None:
    q = half(1, 90, 4, 64)
    plan = launcher.Plan(checked_call(DenseInputs(q, q, q)), KIND, {})
    plan.add_output("out", q.shape, HALF)
    plan.load()
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = plan.run(DenseInputs(q, q, q))["out"]
    assert type(out) is Tensor and out.shape == q.shape and out.data_ptr()


# ---- alignment


def test_steps_that_no_int_holds_cannot_be_read() -> None:
    def far(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=HALF, device="meta")[..., :8]

    assert not layouts.has_kernel_layout(far(1, 2, 1, 2**31)) and not layouts.has_kernel_layout(far(1, 1, 2, 2**31))
    assert layouts.has_kernel_layout(far(2, 1, 1, 2**33))  # 64 bits hold the steps between sequences


def test_small_problems_are_read_element_by_element_large_ones_copied(launches: LaunchRecord) -> None:
    with use_backend("fused"):
        out = flash_attn_func(*(half(1, 9, 2, 20) for _ in range(3)))
        assert dict(launches.last.variant.macros)["VEC"] == 1 and out.shape[-1] == 20 == out.stride(-2)
        out = flash_attn_func(*(half(1, 9000, 2, 20) for _ in range(3)))
        assert dict(launches.last.variant.macros)["VEC"] == 8 and out.shape[-1] == 20 and out.stride(-2) == 24
        assert launches.last.fields["q_s"] == (0, 48, 24)


# ---- what kernels are told


@pytest.mark.parametrize("rows", [1, 90])
@pytest.mark.parametrize("view", ["by heads", "wide", "one row for all"])
def test_results_lie_as_the_kernels_write_them_however_q_does(view: str, rows: int, launches: LaunchRecord) -> None:
    q = {
        "by heads": half(2, 4, rows, 64).transpose(1, 2),
        "wide": half(2, rows, 4, 128)[..., :64],
        "one row for all": half(2, 1, 4, 64).expand(2, rows, 4, 64),
    }[view]
    cache, new, tables = half(2, 200, 4, 64), half(2, rows, 4, 64), half(200, 16)
    calls = (
        lambda: flash_attn_func(q, cache, cache),
        lambda: flash_attn_with_kvcache(q, cache, cache, new, new, tables, tables, cache_seqlens=9),
    )
    for call in calls:
        with use_backend("fused"):
            out = call()
        assert launches.last.fields["out_s"] == layouts.contiguous_strides(out.shape)
        assert out.is_contiguous() and launches.last.fields["out"] == out.data_ptr()


def test_lengths_beyond_the_tokens_launch_no_tiles_for_them(launches: LaunchRecord) -> None:
    q, starts = half(300, 1, 64), cumulative(300)
    with use_backend("fused"):
        flash_attn_varlen_func(q, q, q, starts, starts, 2**30, 2**30)
    assert launches.last.fields["seqlen_q"] == 300


def test_more_blocks_than_a_launch_has_are_refused_before_anything_is_loaded(launches: LaunchRecord) -> None:
    """2^30 tokens of 512 heads in 65,536 sequences; shapes without the memory."""
    q = torch.zeros(1, 1, 64, dtype=HALF).expand(2**30, 512, 64)
    starts = torch.arange(2**16 + 1, dtype=torch.int32) * 2**14
    with use_backend("fused"), pytest.raises(KernelsFailed, match=r"need 2181070848 blocks, .* batch 65536, 512 heads"):
        flash_attn_varlen_func(q, q, q, starts, starts, 2**20, 2**20)
    assert not launches.seen and not launches.variants


def test_a_call_of_too_many_blocks_goes_to_the_next_backend_alone(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, starts = half(300, 1, 256).requires_grad_(), cumulative(200, 100)

    def served(most_blocks: int) -> tuple[list[str], bool]:
        """Return the launches, and whether the forward was fused."""
        monkeypatch.setattr(launcher, "_MAX_BLOCKS", most_blocks)
        call_cache.forget()
        launches.seen.clear()
        reset_backend_counts()
        flash_attn_varlen_func(q, q, q, starts, starts, 250, 250).sum().backward()
        return launches.entries, backend_counts() == {"fused": 1}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served(launcher._MAX_BLOCKS)
        forward, *backward = (launch.blocks for launch in launches.seen)
        assert served(forward - 1) == ([], False)
        assert served(max(backward) - 1) == (["forward"], True)
        assert served(max(backward)) == (["forward", "delta", "dkdv", "dq"], True)


def test_a_step_of_too_many_blocks_is_served_by_operators_and_the_next_backend(
    launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_MAX_BLOCKS", 0)
    cache, new = torch.zeros(2, 50, 2, 64, dtype=HALF), half(2, 1, 2, 64)
    for length in (5, 6):
        flash_attn_with_kvcache(half(2, 1, 8, 64), cache, cache, new, new, cache_seqlens=length)
        assert torch.equal(cache[:, length], new[:, 0])
    assert not launches.seen


def test_an_unwanted_lse_is_not_written(launches: LaunchRecord) -> None:
    q = half(1, 9, 4, 64)
    with use_backend("fused"):
        flash_attn_func(q, q, q)
        assert launches.last.fields["lse"] == 0
        flash_attn_func(q, q, q, return_attn_probs=True)
        assert launches.last.fields["lse"] and not launches.last.fields["lse_true"]
        flash_attn_func(q.clone().requires_grad_(), q, q, causal=True, alibi_slopes=torch.rand(4))
    assert launches.last.fields["lse_true"] and launches.last.fields["lse_has_position"]


@pytest.mark.parametrize("case", ["dense", "packed", "fp16", "few rows", "cache", "pages"])
def test_bf16_that_passes_by_often_is_copied_once_and_caches_never(case: str, launches: LaunchRecord) -> None:
    dtype = HALF if case == "fp16" else torch.bfloat16
    q = randn(1, 600 if case == "few rows" else 2600, 2, 64, dtype=dtype)
    k, lengths, whole = q[:, :, :1], cumulative(1300, 1300), cumulative(2600)
    with use_backend("fused"):
        if case == "packed":
            flash_attn_varlen_func(q[0], k[0], k[0], lengths, lengths, 1300, 1300)
        elif case == "cache":
            flash_attn_with_kvcache(q, k, k, cache_seqlens=2600)
        elif case == "pages":
            pages = torch.arange(13, dtype=torch.int32)[None]
            slots = k.reshape(13, 200, 1, 64)
            flash_attn_varlen_func(q[0], slots, slots, whole, whole, 2600, 2600, block_table=pages)
        else:
            flash_attn_func(q, k, k)
    is_copied = case in ("dense", "packed")
    assert launches.entries == ["absmax"] * (case != "fp16") + ["to_half"] * is_copied + ["forward"]
    read = [launches.last.fields[name] for name in ("k", "v")]
    start = launches.last.fields["copies"]
    assert (read == [start, start + 2 * k.numel()]) == is_copied
    if is_copied:  # contiguous, as k is not
        assert launches.last.fields["k_s"] == (0 if case == "packed" else 2600 * 64, 64, 64)


def test_a_backward_has_one_place_for_copies_of_rows_and_then_of_keys(launches: LaunchRecord) -> None:
    q, k = randn(1, 2600, 4, 64, dtype=torch.bfloat16).requires_grad_(), randn(1, 2600, 2, 64, dtype=torch.bfloat16)
    with use_backend("fused"):
        flash_attn_func(q, k, k).sum().backward()
    assert launches.entries[3:] == ["delta", "to_half", "dkdv", "to_half", "dq"]
    dkdv, dq = launches.seen[5].fields, launches.seen[7].fields
    start = dkdv["copies"]
    assert [dkdv[name] for name in ("q", "dout")] == [start, start + 2 * q.numel()]
    assert [dq[name] for name in ("k", "v")] == [start, start + 2 * k.numel()]
    assert dkdv["k"] == k.data_ptr() and dq["q"] == q.data_ptr()  # what a block owns is converted once in any case


# ---- decode and append


def decode(seqlen_new: int = 1, rotary: bool = True, **cache: int | Tensor) -> Tensor:
    k_cache = half(2, 1000, 2, 64)
    new = half(2, seqlen_new, 2, 64)
    tables = {"rotary_cos": half(1000, 16), "rotary_sin": half(1000, 16)} if rotary else {}
    with use_backend("fused"):
        return flash_attn_with_kvcache(half(2, 1, 8, 64), k_cache, k_cache, new, new, causal=True, **tables, **cache)


def test_a_rotary_sin_without_cos_is_left_alone(launches: LaunchRecord) -> None:
    decode(rotary=False, cache_seqlens=5, rotary_sin=torch.ones(3))
    assert launches.last.fields["rotary_sin"] == launches.last.fields["rotary_dim"] == 0


def test_a_stream_keeps_its_workspace_of_splits(launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    def counters() -> int:
        decode(cache_seqlens=torch.tensor([5, 700], dtype=torch.int32), rotary=False)
        found: int = launches.last.fields["counters"]
        return found

    first = counters()
    assert first and counters() == first
    monkeypatch.setattr(nvrtc, "stream", lambda device: 7)
    assert counters() != first
    monkeypatch.setattr(nvrtc, "stream", lambda device: 0)
    assert counters() == first
    kept = list(workspaces._workspaces.values())  # alive, so that no other gets its id
    workspaces.discard()
    counters()
    assert set(map(id, kept)).isdisjoint(map(id, workspaces._workspaces.values()))


def test_results_of_a_plan_are_new_memory_in_each_run(launches: LaunchRecord) -> None:
    """They are made like tensors without memory, which all plans share."""
    q = half(1, 8, 2, 64)
    with use_backend("fused"):
        first, second = (flash_attn_func(q, q, q, return_attn_probs=True)[:2] for _ in range(2))
    for one, other in zip(first, second):
        assert one.shape == other.shape and one.data_ptr() != other.data_ptr() != 0
        assert one.is_contiguous() and one.untyped_storage().nbytes() == one.nbytes


@pytest.mark.parametrize(("stream", "shared"), [(0, True), (1, True), (2, False), (64, True)])
def test_threads_share_a_streams_workspace_but_for_the_per_thread_default_stream(
    stream: int, shared: bool, launches: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handle 2 (cudaStreamPerThread) is another stream in each thread: their launches may run at once."""
    monkeypatch.setattr(nvrtc, "stream", lambda device: stream)

    def ask() -> Tensor:
        return workspaces.acquire(9000, -1, torch.device("cpu"))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask).result()
    assert (ask() is other) == shared and ask() is ask()


def is_clear(workspace: Tensor) -> bool:
    return not workspace[: 4 * workspaces.COUNTERS].any()


def test_a_workspace_is_clear_and_serves_until_one_is_larger_but_for_captured_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused_on_cpu.emulate(monkeypatch)  # where memory comes with rubbish in it
    place = torch.device("cpu")
    small, large = workspaces.acquire(9000, -1, place), workspaces.acquire(90000, -1, place)
    assert large.nbytes == 90000 and workspaces.acquire(9000, -1, place) is large is not small
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: True)
    captured = [workspaces.acquire(9000, -1, place) for _ in range(2)]
    assert len({one.data_ptr() for one in (small, large, *captured)}) == 4
    assert all(map(is_clear, (small, large, *captured)))
    assert list(workspaces._workspaces.values()) == [large]


def test_graphs_that_are_replayed_in_order_share_their_streams_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.record(monkeypatch)
    monkeypatch.setattr(workspaces, "_kept", [])
    place = torch.device("cpu")
    eager = workspaces.acquire(9000, -1, place)
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: True)
    with cuda_capture.replayed_in_order():
        assert workspaces.acquire(9000, -1, place) is eager is workspaces.acquire(8000, -1, place)
        larger = workspaces.acquire(90000, -1, place)
    assert larger is not eager and larger.nbytes == 90000  # which the graph's own pool holds
    assert workspaces.acquire(9000, -1, place) is not eager
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: False)
    workspaces.acquire(90000, -1, place)
    assert [one is eager for one in workspaces._kept] == [True]  # it outlives the larger one that calls use now


def test_a_workspace_that_is_kept_comes_from_no_pool_or_mode_of_the_callers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, cleared = [], workspaces._allocate_cleared

    def watched(size: int, place: torch.device) -> Tensor:
        threads.append(threading.get_ident())
        return cleared(size, place)

    monkeypatch.setattr(workspaces, "_allocate_cleared", watched)
    monkeypatch.setattr(workspaces, "_workspaces", {})
    monkeypatch.setattr(nvrtc, "stream", lambda device: 0)
    with FakeTensorMode():
        kept = workspaces.acquire(9000, -1, torch.device("cpu"))
    assert type(kept) is Tensor and kept.data_ptr() and is_clear(kept)
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.parametrize(("address", "pool", "expected"), [(0, (0, 0), False), (0, (0, 3), True), (64, (0, 3), False)])
def test_memory_of_a_pool_is_known_where_pools_are_not_a_threads(
    address: int, pool: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.empty(64, dtype=torch.uint8)
    segment = {"address": memory.data_ptr() + address, "total_size": 4096, "segment_pool_id": pool}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    assert workspaces._is_in_pool(memory) == expected


def test_a_workspace_lives_until_its_launch_among_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    launches = fused_on_cpu.record(monkeypatch, compute=lambda *launch: alive.append(made[-1]() is not None))
    workspace = workspaces.acquire

    def replaced(size: int, device: int, place: torch.device) -> Tensor:
        found = workspace(size, device, place)
        workspaces.discard()  # as another thread does whose call wants a larger one
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(workspaces, "acquire", replaced)
    flash_attn_func(half(1, 1, 2, 64), half(1, 512, 2, 64), half(1, 512, 2, 64))
    assert alive == [True] and launches.last.fields["splits"] > 1


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("seqlen_new", [1, 17])
@pytest.mark.parametrize("far", ["k_cache", "v_cache", "k", "v", "rotary_cos", "q", None])
def test_rows_too_far_apart_for_an_int_are_copied_and_a_cache_of_them_is_left_to_others(
    far: str | None, seqlen_new: int
) -> None:
    shapes = {"q": (2, 3, 2), "k_cache": (2, 50, 2), "v_cache": (2, 50, 2), "k": (2, seqlen_new, 2)}
    shapes |= {"v": (2, seqlen_new, 2), "rotary_cos": (50,), "rotary_sin": (50,)}
    given = {
        name: torch.empty(*shape, 2**31 if name == far else 16, dtype=HALF, device="meta")[
            ..., : 16 if len(shape) > 1 else 8
        ]
        for name, shape in shapes.items()
    }
    q, k_cache, v_cache, *new = given.values()
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    tensors = CacheInputs(q, k_cache, v_cache, None, lengths, None, None, None, None, *new)
    run = forward.prepare(*call_of(tensors, Options(causal=True, rotary_interleaved=True)), is_over_cache=True)
    if far is not None and far.endswith("cache"):
        assert run is None
    else:
        assert hasattr(run, "__self__") == (far is None)


def test_appending_is_known_to_autograd(launches: LaunchRecord) -> None:
    cache, new = half(2, 10, 2, 64), half(2, 1, 2, 64)
    before = cache._version
    with use_backend("fused"):
        flash_attn_with_kvcache(half(2, 1, 8, 64), cache, cache, new, new, cache_seqlens=3)
    assert cache._version > before


@pytest.mark.parametrize("note", [torch_state.note_written, torch_state._note_each], ids=["PyTorch's", "older ones'"])
def test_written_tensors_change_version_except_in_inference_mode(
    note: Callable[[tuple[Tensor, ...]], None],
) -> None:
    with torch.inference_mode():
        without = half(3)
    given = [half(3), without, half(3)]
    note(tuple(given))
    assert [x._version for x in given if not x.is_inference()] == [1, 1]
