"""The backend in vLLM's own classes, on a CPU: builder, layer and cache against a formula in fp64."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import settings, use_backend
from flash_attn_compat.core import checks, cuda_capture
from tests.kernels import emulate, fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.vllm import batches
from tests.vllm.batches import Batch

MIXED = Batch()
DECODES = Batch(((1, 40), (1, 17), (1, 1)))
BATCHES = {
    "decode steps and prefills": MIXED,
    "decode steps": DECODES,
    "prefills": Batch(((33, 33), (20, 20))),
    "chunks of prefills": Batch(((20, 75), (16, 48))),
    "pages of 48 slots, heads outside": replace(MIXED, page=48, layout="HND"),
    "one key head of eight": replace(MIXED, heads=(8, 1), layout="HND"),
    "window": replace(MIXED, window=12),
    "window that hides nothing": replace(MIXED, window=4096, layout="HND"),
    "softcap and window, head_dim 256": replace(MIXED, softcap=30.0, window=20, head_dim=256),
    "ALiBi": replace(MIXED, alibi=True),
    "sinks": replace(MIXED, sinks=True),
    "sinks in a window": replace(MIXED, sinks=True, window=9, layout="HND"),
    "bf16": replace(MIXED, dtype=torch.bfloat16),
    "padding behind decode steps": replace(DECODES, padding=(5, 2)),
    "padding behind decode steps, a row for each sequence": replace(DECODES, padding=(2, 2)),
    "padding behind a mixed batch": replace(MIXED, padding=(3, 0)),
    "8-bit cache": replace(MIXED, kv_cache_dtype="fp8"),
    "8-bit cache, e5m2, bf16, heads outside": replace(
        MIXED, kv_cache_dtype="fp8_e5m2", dtype=torch.bfloat16, layout="HND"
    ),
    "8-bit cache, softcap and window": replace(MIXED, kv_cache_dtype="fp8", softcap=30.0, window=20),
    "head_dim 72": replace(MIXED, head_dim=72),
    "keys of another sequence, all seen": replace(MIXED, causal=False),
    "a window to both sides": replace(MIXED, causal=False, window=7),
}
ON_KERNELS = (
    "decode steps and prefills",
    "softcap and window, head_dim 256",
    "sinks in a window",
    "padding behind decode steps",
    "padding behind decode steps, a row for each sequence",
)


@pytest.fixture(autouse=True)
def vllms_kernel(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's kernel that writes to the cache runs on a GPU only."""
    import vllm._custom_ops

    monkeypatch.setattr(vllm._custom_ops, "reshape_and_cache_flash", batches.write_keys)


def check(output: Tensor, answer: Tensor) -> None:
    found, bound = output[: len(answer)].double(), 2**-8 if output.dtype == torch.float16 else 2**-5
    assert torch.isfinite(found).all() and (found - answer).abs().max() < bound


@pytest.mark.parametrize("name", BATCHES)
def test_a_layer_answers_as_the_formula(backend: ModuleType, name: str) -> None:
    built = BATCHES[name].build()
    check(built.run(backend), built.answer())


@pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())
@pytest.mark.parametrize("name", ON_KERNELS)
def test_turings_kernels_write_the_answer_to_vllms_output(backend: ModuleType, turing: LaunchRecord, name: str) -> None:
    built = BATCHES[name].build()
    output = built.run(backend)
    check(output, built.answer())
    steps = [launch for launch in turing.seen if launch.variant.entry in ("forward", "decode")]
    assert steps[0].fields["out"] == output.data_ptr()
    assert not output[len(built.answer()) :].any()


@pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())
def test_decode_steps_of_a_mixed_batch_get_the_decode_kernel(backend: ModuleType, turing: LaunchRecord) -> None:
    MIXED.build().run(backend)
    assert turing.entries == ["decode", "forward"]


@pytest.mark.parametrize(("name", "one_row_each"), [
    ("decode steps", [True]), ("decode steps and prefills", [True, False]), ("prefills", [False]),
    ("padding behind decode steps", [False]), ("padding behind decode steps, a row for each sequence", [True]),
])  # fmt: skip
def test_sequences_of_one_row_each_need_no_starts(backend: ModuleType, name: str, one_row_each: list[bool]) -> None:
    parts = BATCHES[name].build().metadata(backend).parts
    assert [part.starts is None for part in parts] == one_row_each


IN_ONE_LAUNCH = {
    "a row for each sequence": DECODES,
    "8-bit cache": replace(DECODES, kv_cache_dtype="fp8"),
    "window, heads outside": replace(DECODES, window=12, layout="HND"),
    "sinks": replace(DECODES, sinks=True, head_dim=128),
    "padding of a graph": replace(DECODES, padding=(2, 2)),
}


@pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())
@pytest.mark.parametrize("name", IN_ONE_LAUNCH)
def test_decode_steps_write_their_keys_in_the_launch_that_attends(
    backend: ModuleType, turing: LaunchRecord, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(checks, "may_read", lambda x: False)  # as on a GPU; padding has a length of -1
    built, by_vllm = IN_ONE_LAUNCH[name].build(), IN_ONE_LAUNCH[name].build()
    check(built.run(backend, appends_in_launch=True), built.answer())
    assert turing.entries == ["decode"]
    by_vllm.run(backend)
    assert torch.equal(built.cache.nan_to_num(), by_vllm.cache.nan_to_num())


@pytest.mark.parametrize(("batch", "threshold"), [(MIXED, 1), (Batch(((2, 40), (1, 17))), 2), (DECODES, 2)], ids=str)
def test_prefills_and_speculative_decoding_leave_new_keys_to_vllms_kernel(
    backend: ModuleType, batch: Batch, threshold: int
) -> None:
    built = batch.build()
    assert all(part.before is None for part in built.metadata(backend, threshold).parts)
    check(built.run(backend, threshold, appends_in_launch=True), built.answer())


def test_padding_and_dummy_runs_have_no_keys_before_a_step(backend: ModuleType) -> None:
    built = replace(DECODES, padding=(2, 2)).build()
    assert built.metadata(backend).parts[0].before.tolist() == [39, 16, 0, -1, -1]
    dummy = built.metadata(backend, slot_mapping=torch.full_like(built.slots, -1))
    assert dummy.parts[0].before.tolist() == [-1] * 5


def test_a_replay_reads_the_lengths_of_the_last_metadata(backend: ModuleType) -> None:
    builder, built = batches.builder(backend), DECODES.build()
    from vllm.v1.attention.backend import CommonAttentionMetadata

    captured = builder.build(0, CommonAttentionMetadata(**built.common)).parts[0].before
    longer = built.common | dict(seq_lens=built.common["seq_lens"] + 1)
    builder.build(0, CommonAttentionMetadata(**longer))
    assert captured.tolist() == [40, 17, 1]


def test_a_layer_that_shares_another_layers_cache_writes_no_keys(backend: ModuleType) -> None:
    built = DECODES.build()
    before, output = built.cache.clone(), torch.zeros_like(built.query)
    impl = built.impl(backend, kv_sharing_target_layer_name="another")
    impl.forward(None, built.query, built.new_keys, built.new_values, built.cache, built.metadata(backend), output)
    assert torch.equal(built.cache.nan_to_num(), before.nan_to_num())


def test_drafts_of_speculative_decoding_are_decode_steps(backend: ModuleType) -> None:
    built = Batch(((4, 40), (2, 17), (1, 9), (30, 60))).build()
    metadata = built.metadata(backend, threshold=4)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 7)
    assert [part.longest for part in metadata.parts] == [4, 30]
    check(built.run(backend, threshold=4), built.answer())


def test_a_prefix_in_shared_pages_is_read_by_both_sequences(backend: ModuleType) -> None:
    built = Batch(((3, 35), (5, 37))).build()
    for kept in (built.keys, built.values):
        kept[1][:32] = kept[0][:32]
    built.table[1, :2] = built.table[0, :2]
    check(built.run(backend), built.answer())


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("window", [None, 5])
def test_encoders_attend_among_each_sequences_tokens(backend: ModuleType, attn_type: str, window: int | None) -> None:
    built = Batch(((33, 33), (1, 1), (20, 20)), window=window, padding=(4, 0)).build()
    impl, metadata, output = (
        built.impl(backend, attn_type=attn_type),
        built.metadata(backend),
        torch.zeros_like(built.query),
    )
    layer, empty = SimpleNamespace(), torch.tensor([])
    impl.do_kv_cache_update(layer, built.new_keys, built.new_values, empty, metadata.slot_mapping)
    impl.forward(layer, built.query, built.new_keys, built.new_values, empty, metadata, output)
    check(output, built.answer(causal=False))


def test_cross_attention_reads_all_encoder_keys_of_the_cache(backend: ModuleType) -> None:
    built = Batch(((3, 20), (1, 33))).build()
    from vllm.v1.attention.backend import CommonAttentionMetadata

    impl = built.impl(backend, attn_type="encoder_decoder")
    impl.do_kv_cache_update(
        SimpleNamespace(_k_scale=None, _v_scale=None), built.new_keys, built.new_values, built.cache, built.slots
    )
    rows = Batch(((5, 20), (1, 33)))  # more rows than were written: the keys are another sequence's
    other = rows.build()
    other.keys, other.values = built.keys, built.values
    common = CommonAttentionMetadata(**built.common | dict(
        query_start_loc=other.common["query_start_loc"], query_start_loc_cpu=other.common["query_start_loc_cpu"],
        max_query_len=5, num_actual_tokens=6, causal=False,
    ))  # fmt: skip
    output = torch.zeros_like(other.query)
    impl.forward(None, other.query, None, None, built.cache, batches.builder(backend).build(0, common), output)
    check(output, other.answer(causal=False))


def test_another_block_table_replaces_that_of_each_part(backend: ModuleType) -> None:
    built = MIXED.build()
    metadata = built.metadata(backend, block_table_tensor=torch.full_like(built.table, 999))
    moved = batches.builder(backend).update_block_table(metadata, built.table, built.slots)
    assert all(map(torch.equal, (part.table for part in moved.parts), (built.table[:2], built.table[2:])))
    assert moved.block_table is built.table and moved.slot_mapping is built.slots


def test_metadata_of_decode_steps_holds_vllms_own_tensors(backend: ModuleType) -> None:
    """A captured graph reads them again at each replay, so copies would hold the lengths of the capture."""
    built = DECODES.build()
    (part,) = built.metadata(backend).parts
    assert part.lengths is built.common["seq_lens"] and part.table is built.table and part.rows is None
    (part,) = Batch(((2, 40), (1, 17))).build().metadata(backend, threshold=2).parts
    assert part.starts is not None and part.rows is None


def test_bounds_of_decode_steps_do_not_depend_on_lengths(backend: ModuleType) -> None:
    """They are launched by these numbers, and a graph keeps its launches."""
    shorter, longer = (Batch(((1, n),)).build().metadata(backend).parts[0].longest for n in (3, 1000))
    assert shorter == longer


def test_graphs_are_for_batches_of_equally_many_rows(backend: ModuleType) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    support = backend.CompatMetadataBuilder.get_cudagraph_support(None, None)
    assert support == AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
@pytest.mark.parametrize("captures", [False, True])
def test_newer_gpus_run_our_kernels_alone_and_captures_share_a_workspace(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], captures: bool
) -> None:
    monkeypatch.setattr(settings, "capability", lambda device: capability)
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda device: captures)
    from flash_attn_compat.vllm import layer

    q = SimpleNamespace(is_cuda=True, device="cuda", get_device=lambda: 0)
    with layer._surroundings(q):
        assert (settings.used_backend() == "fused") == (capability == (9, 0))
        assert cuda_capture.are_replayed_in_order() == captures
    assert settings.used_backend() is None and not cuda_capture.are_replayed_in_order()


def test_without_metadata_a_layer_fills_the_output(backend: ModuleType) -> None:
    built, output = MIXED.build(), torch.full((3, 4, 64), torch.nan)
    assert not built.impl(backend).forward(None, built.query, None, None, torch.tensor([]), None, output).any()


def test_a_warm_up_launches_the_kernels_of_decode_steps_and_prefills(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fused_on_cpu.record(monkeypatch)
    with use_backend("fused"):
        assert MIXED.build().impl(backend).warm_up(torch.float16, torch.device("cpu"))
    assert found.entries == ["decode", "decode", "forward", "forward", "decode"]


def test_layers_of_one_kind_are_warmed_up_once(backend: ModuleType) -> None:
    windowed = replace(MIXED, window=9).build()
    impls = [MIXED.build().impl(backend), windowed.impl(backend), MIXED.build().impl(backend)]
    layers = [*(SimpleNamespace(impl=impl) for impl in impls), SimpleNamespace(impl=None), None]
    assert [len(impls) for impls in backend._impls_by_kind(layers)] == [2, 1]


# ---- refusals


REFUSED: dict[str, Any] = {
    "page size": lambda cache: cache[:, :, :15],
    "dtype": lambda cache: cache.bfloat16(),
    "heads": lambda cache: cache.transpose(1, 2),
    "width": lambda cache: cache[..., :64],
    "pages": lambda cache: cache[0],
    "channels": lambda cache: cache.mT.contiguous().mT,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_that_kernels_cannot_read_is_refused_by_name(backend: ModuleType, name: str) -> None:
    built = MIXED.build()
    before, cache = built.cache.clone(), REFUSED[name](built.cache)
    impl, output = built.impl(backend), torch.zeros_like(built.query)
    with pytest.raises(ValueError, match="kv_cache must have shape"):
        impl.do_kv_cache_update(None, built.new_keys, built.new_values, cache, built.slots)
    with pytest.raises(ValueError, match="kv_cache must have shape"):
        impl.forward(None, built.query, None, None, cache, built.metadata(backend), output)
    assert not output.any() and torch.equal(built.cache.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(kv_cache_dtype="int8_per_token_head"), "kv_cache_dtype"),
        (dict(use_alibi_sqrt=True), "use_alibi_sqrt"),
        (dict(chunk_lookback=1), "chunk_lookback"),
        (dict(sinks=torch.zeros(3)), "sinks"),
    ],
)
def test_a_layer_refuses_options_that_it_does_not_know(backend: ModuleType, options: dict[str, Any], word: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=word):
        MIXED.build().impl(backend, **options)


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_a_quantised_output_is_refused(backend: ModuleType, name: str) -> None:
    built = MIXED.build()
    with pytest.raises(NotImplementedError, match="quantised"):
        built.impl(backend).forward(
            None, built.query, None, None, built.cache, None, built.query, **{name: torch.ones(1)}
        )


def test_a_causal_flag_for_each_sequence_is_refused(backend: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="causal"):
        MIXED.build().metadata(backend, causal=torch.tensor([True, False, True, True]))


def test_a_model_with_reference_sliding_windows_is_refused(backend: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="rswa_window"):
        batches.builder(backend, rswa_window=128)


# ---- what is supported


def reasons(backend: ModuleType, **changes: Any) -> list[str]:
    from vllm.platforms.interface import DeviceCapability

    given = dict(
        head_size=128, dtype=torch.float16, kv_cache_dtype="auto", block_size=None, use_mla=False, has_sink=False,
        use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, attn_type="decoder",
        device_capability=DeviceCapability(7, 5),
    )  # fmt: skip
    found: list[str] = backend.CompatBackend.validate_configuration(**given | changes)
    return found


@pytest.fixture
def with_nvrtc(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.nvrtc, "compiler", lambda: None)


SUPPORTED: list[dict[str, Any]] = [
    {}, dict(head_size=256), dict(head_size=512), dict(dtype=torch.bfloat16), dict(kv_cache_dtype="float16"),
    dict(block_size=16), dict(block_size=48), dict(has_sink=True), dict(has_sliding_window=True),
    dict(attn_type="encoder_only"), dict(attn_type="encoder_decoder"), dict(attn_type="encoder"),
    dict(use_kv_connector=True),
]  # fmt: skip
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (dict(head_size=520), "head_size"),
    (dict(head_size=20), "head_size"),
    (dict(dtype=torch.float32), "dtype"),
    (dict(kv_cache_dtype="int8_per_token_head"), "kv_cache_dtype"),
    (dict(kv_cache_dtype="bfloat16"), "bfloat16 cache"),
    (dict(block_size=24), "block_size"),
    (dict(use_mla=True), "MLA"),
    (dict(use_sparse=True), "sparse"),
    (dict(use_mm_prefix=True), "multimodal"),
    (dict(use_per_head_quant_scales=True), "per-head"),
    (dict(use_non_causal=True), "non-causal"),
    (dict(use_batch_invariant=True), "batch invariance"),
    (dict(use_pcp=True), "PCP"),
]


@pytest.mark.usefixtures("with_nvrtc")
@pytest.mark.parametrize("changes", SUPPORTED, ids=str)
def test_a_layer_that_kernels_compute_is_supported(backend: ModuleType, changes: dict[str, Any]) -> None:
    assert reasons(backend, **changes) == []


@pytest.mark.usefixtures("with_nvrtc")
@pytest.mark.parametrize(("changes", "word"), UNSUPPORTED, ids=str)
def test_any_other_layer_is_declined_with_a_reason(backend: ModuleType, changes: dict[str, Any], word: str) -> None:
    (reason,) = reasons(backend, **changes)
    assert word in reason


@pytest.mark.usefixtures("with_nvrtc")
def test_a_gpu_before_turing_is_declined(backend: ModuleType) -> None:
    from vllm.platforms.interface import DeviceCapability

    assert reasons(backend, device_capability=DeviceCapability(7, 0)) == ["compute capability not supported"]


def test_layers_are_declined_where_kernels_cannot_be_compiled(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise backend.nvrtc.KernelError("not found")

    monkeypatch.setattr(backend.nvrtc, "compiler", fail)
    assert reasons(backend) == ["no NVRTC to compile the kernels: not found"]
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "0")
    assert reasons(backend) == ["FLASH_ATTN_COMPAT_FUSED=0 forbids it"]


@pytest.mark.parametrize("layout", batches.LAYOUTS)
def test_the_cache_has_the_shape_that_layers_read(backend: ModuleType, layout: str) -> None:
    import vllm.v1.attention.backend as interface

    if not hasattr(interface.AttentionBackend, "get_kv_cache_shape"):
        pytest.skip("this vLLM shapes the cache itself")
    from vllm.v1.attention.backends.utils import get_kv_cache_layout, set_kv_cache_layout

    set_kv_cache_layout(layout)
    try:
        get_kv_cache_layout.cache_clear() if hasattr(get_kv_cache_layout, "cache_clear") else None
        order = backend.CompatBackend.get_kv_cache_stride_order()
        with_layers = backend.CompatBackend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    finally:
        set_kv_cache_layout(None)
    assert order == batches.LAYOUTS[layout] and sorted(with_layers) == [0, 1, 2, 3, 4]
    assert backend.CompatBackend.get_kv_cache_shape(7, 32, 2, 64) == (7, 2, 32, 128)
    with pytest.raises(ValueError, match="page size"):
        backend.CompatBackend.get_kv_cache_shape(7, 8, 2, 64)
