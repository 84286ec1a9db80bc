"""The names in flash_attn_interface that other packages build on: signatures, shapes, and the backward of a shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flash_attn_compat import flash_attn_func, flash_attn_interface
from flash_attn_compat.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    maybe_contiguous,
)
from tests.forms.inputs import cumulative, qkv, randn
from tests.forms.support import GENERAL, close, on_backend, on_general_backends
from tests.kernels import fused_on_cpu
from verify import oracle


def test_maybe_contiguous_copies_only_a_strided_last_dimension() -> None:
    x = randn(4, 6)
    assert maybe_contiguous(x) is x and maybe_contiguous(x[:, :3]).data_ptr() == x.data_ptr()
    assert maybe_contiguous(x.t()).is_contiguous() and maybe_contiguous(None) is None


def test_the_key_block_is_that_of_the_common_gpus() -> None:
    sizes = [_get_block_size_n(torch.device("cpu"), d, p, False) for d in (32, 64, 96, 128, 256) for p in (False, True)]
    assert sizes == [128, 128, 128, 64, 64, 64, 64, 32, 64, 64]
    with pytest.raises(AssertionError):
        _get_block_size_n(torch.device("cpu"), 257, False, False)


# ---------------------------------------------------------------- forward


RULES: dict[str, Any] = dict(
    dropout_p=0.0, softmax_scale=0.25, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    alibi_slopes=None,
)  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _flash_attn_forward(q, k, v, **RULES | {"return_softmax": False} | changes)


def backward(*tensors: Tensor | None, **changes: Any) -> Tensor:
    """Of dout, q, k, v, out, softmax_lse, dq, dk, dv."""
    return _flash_attn_backward(*tensors, **RULES | {"deterministic": False} | changes)


@on_general_backends
def test_the_forward_returns_out_lse_an_empty_s_dmask_and_a_random_state(backend: str) -> None:
    q, k, v = qkv(sq=5, sk=9)
    out, lse, s_dmask, rng_state = on_backend(backend, forward, q, k, v, causal=True)
    right, right_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    close(out, right)
    close(lse, right_lse)
    assert s_dmask.shape == (0,) and s_dmask.dtype == q.dtype
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
    with pytest.raises(RuntimeError, match=r"return_softmax is only supported when p_dropout > 0.0"):
        on_backend(backend, forward, q, k, v, return_softmax=True)


# ---------------------------------------------------------------- backward


def empty_grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.full_like(x, torch.nan) for x in (q, k, v))


MASKS = {
    "plain": {},
    "softcap": dict(softcap=2.0),
    "alibi": dict(alibi_slopes=torch.tensor([0.3, 0.1, 0.2, 0.0])),
    "causal": dict(causal=True),
    "causal_alibi": dict(causal=True, alibi_slopes=torch.tensor([0.3, 0.1, 0.2, 0.0])),
}


def as_half(x: Tensor) -> Tensor:
    return x.half()


def without_memory(x: Tensor) -> Tensor:
    """As a sharded parameter between its uses."""
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lse", as_half, "softmax_lse must"),
        ("lse", torch.Tensor.double, "softmax_lse must"),
        ("lse", lambda x: x.to("meta"), "softmax_lse must"),
        ("dk", as_half, "dk must have the same dtype as q"),
        ("dv", without_memory, "dv reaches beyond its memory"),
        ("dout", torch.Tensor.to_sparse, "dout must be a dense tensor, got layout torch.sparse_coo"),
    ],
)
def test_unreadable_layouts_are_refused_before_any_write(name: str, change: Any, message: str) -> None:
    q, k, v = qkv()
    out, lse, _, _ = forward(q, k, v)
    backward(q, q, k, v, out, lse, *empty_grads(q, k, v))  # whose like is known from then on
    given = dict(dout=q, lse=lse, **{f"d{name}": grad for name, grad in zip("qkv", empty_grads(q, k, v))})
    given[name] = change(given[name])
    with pytest.raises(RuntimeError, match=message):
        backward(given.pop("dout"), q, k, v, out, *given.values())
    assert all(given[name].isnan().all() for name in ("dq", "dk", "dv") if given[name].untyped_storage().nbytes())


@on_general_backends
@pytest.mark.parametrize("mask", MASKS)
def test_a_shard_of_the_keys_gives_its_exact_share_through_the_strides_it_is_given(backend: str, mask: str) -> None:
    q, k, v = qkv(sq=9, sk=20, h=4, hk=2)
    dout, kwargs = randn(*q.shape, seed=5), MASKS[mask]
    out, lse, _, _ = forward(q, k, v, **kwargs)
    wide_dq, dkv = torch.full((2, 18, 4, 16), 7.0), torch.full((2, 20, 3, 2, 16), 7.0)
    total = torch.zeros_like(q)
    # Where positions count, a shard of some keys is another problem.
    for keys in (slice(0, 7), slice(7, 20)) if mask in ("plain", "softcap") else (slice(0, 20),):
        grads = wide_dq[:, 9:], dkv[:, keys, 0], dkv[:, keys, 1]
        on_backend(backend, backward, dout, q, k[:, keys], v[:, keys], out, lse, *grads, **kwargs)
        total += grads[0]
    right = oracle.answer("flash_attn_func", dict(q=q, k=k, v=v, **kwargs), dout)
    for name, ours in (("q", total), ("k", dkv[:, :, 0]), ("v", dkv[:, :, 1])):
        close(ours, right.grads[name], right.magnitude(name))
    assert (wide_dq[:, :9] == 7).all() and (dkv[:, :, 2] == 7).all()


@on_general_backends
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_gradient_that_is_none_is_left_out(backend: str, missing: int) -> None:
    q, k, v = qkv()
    dout = randn(*q.shape, seed=5)
    out, lse, _, _ = forward(q, k, v)
    whole, partial = empty_grads(q, k, v), list(empty_grads(q, k, v))
    partial[missing] = None
    for grads in (whole, partial):
        on_backend(backend, backward, dout, q, k, v, out, lse, *grads)
    assert all(torch.equal(found, right) for found, right in zip(partial, whole) if found is not None)


@on_general_backends
def test_a_row_with_plus_inf_lse_gets_and_sends_nothing(backend: str) -> None:
    q, k, v = qkv()
    out, lse, _, _ = forward(q, k, v)
    lse, out = lse.clone(), out.clone()
    lse[:, :, 2], out[:, 2] = torch.inf, 0
    dout = torch.zeros_like(q)
    dout[:, 2] = 1
    grads = empty_grads(q, k, v)
    on_backend(backend, backward, dout, q, k, v, out, lse, *grads)
    assert not any(grad.any() for grad in grads)


@on_general_backends
def test_rng_state_reproduces_the_dropout_mask_and_softmax_d_is_of_kept_scores(backend: str) -> None:
    q, k, v = qkv(sq=130, sk=9)
    dout = randn(*q.shape, seed=5)
    torch.manual_seed(3)
    out, lse, s_dmask, rng_state = on_backend(backend, forward, q, k, v, dropout_p=0.4, return_softmax=True)
    torch.manual_seed(99)
    grads, options = empty_grads(q, k, v), dict(dropout_p=0.4, rng_state=rng_state)
    softmax_d = on_backend(backend, backward, dout, q, k, v, out, lse, *grads, **options)
    right = oracle.answer("flash_attn_func", dict(q=q, k=k, v=v, dropout_p=0.4), dout, keep=s_dmask >= 0)
    for name, ours in zip("qkv", grads, strict=True):
        close(ours, right.grads[name], right.magnitude(name))
    assert softmax_d.shape == (2, 2, 256) and softmax_d.dtype == torch.float32
    close(softmax_d[:, :, :130], (dout * out).sum(-1).transpose(1, 2) * (1 - 0.4), 16)


@on_general_backends
@pytest.mark.parametrize("causal", [False, True])
def test_the_varlen_backward_writes_each_sequences_gradients_and_zeros_outside(backend: str, causal: bool) -> None:
    """Of two sequences, and one token of q and one of k outside of both."""
    tensors = dict(q=randn(9, 4, 16, seed=1), k=randn(12, 2, 16, seed=2), v=randn(12, 2, 16, seed=3))
    lengths = dict(cu_seqlens_q=cumulative(3, 5), cu_seqlens_k=cumulative(4, 7), max_seqlen_q=5, max_seqlen_k=7)
    call, rules = tensors | lengths, RULES | {"causal": causal}
    out, lse, _, _ = _flash_attn_varlen_forward(**call, **rules)
    dout, grads = randn(9, 4, 16, seed=4), dict(zip(("dq", "dk", "dv"), empty_grads(*tensors.values())))
    given = dict(dout=dout, out=out, softmax_lse=lse, deterministic=False) | grads
    softmax_d = on_backend(backend, _flash_attn_varlen_backward, **call, **rules, **given)
    right = oracle.answer("flash_attn_varlen_func", call | dict(causal=causal), dout)
    for name in "qkv":
        close(grads[f"d{name}"], right.grads[name], right.magnitude(name))
    # Each sequence starts 128 columns later.
    products = (dout * out).sum(-1).t()
    assert softmax_d.shape == (4, 9 + 128 * 2) and softmax_d.dtype == torch.float32
    close(softmax_d[:, :3], products[:, :3], 16)
    close(softmax_d[:, 3 + 128 : 8 + 128], products[:, 3:8], 16)


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
def test_softmax_d_is_0_outside_of_sequences(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels leave tokens outside of all sequences unwritten."""
    if backend == "fused":
        fused_on_cpu.emulate(monkeypatch)
    starts = cumulative(3, 0, 130, 0)
    q, k, v, dout = randn(4, 140, 2, 16).half()
    call = (starts, starts, 130, 130, 0.0, 0.25, True, -1, -1, 0.0, None)
    out, lse, *_ = on_backend(backend, _flash_attn_varlen_forward, q, k, v, *call)
    dout[133:], out[133:] = torch.nan, 1.0
    given = dout, q, k, v, out, lse, None, None, None, *call, False
    softmax_d = on_backend(backend, _flash_attn_varlen_backward, *given)
    products, expected = (dout.float() * out).sum(-1).t(), torch.zeros(2, 140 + 4 * 128)
    expected[:, :3], expected[:, 3 + 2 * 128 : 133 + 2 * 128] = products[:, :3], products[:, 3:133]
    close(softmax_d, expected, 16)


def test_softmax_d_is_fp32_for_any_type_of_dropout_p() -> None:
    q, k, v = qkv()
    for dropout_p in (0.5, torch.tensor([0.5], dtype=torch.float64)):
        out, lse, _, rng_state = forward(q, k, v, dropout_p=dropout_p)
        softmax_d = backward(out, q, k, v, out, lse, None, None, None, dropout_p=dropout_p, rng_state=rng_state)
        assert softmax_d.dtype == torch.float32
        close(softmax_d[:, :, :7], (out * out).sum(-1).transpose(1, 2) / 2, 16)


# ---------------------------------------------------------------- the autograd Functions


def test_the_autograd_functions_take_the_arguments_of_flash_attn() -> None:
    q, k, v = qkv()
    cu = cumulative(7, 7)
    options = (0.0, None, True, (-1, -1), 0.0, None, False, False)
    right = flash_attn_func(q, k, v, causal=True)
    for packed in (False, True):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v)) if packed else (q, k, v)
        dim = 1 if packed else 2
        kv, all_in_one = torch.stack([k, v], dim), torch.stack([q, k, v], dim)
        name, both, one, more = ("Varlen", (cu, cu, 7, 7), (cu, 7), (None,)) if packed else ("", (), (), ())
        functions = [
            getattr(flash_attn_interface, f"FlashAttn{name}{kind}Func") for kind in ("", "KVPacked", "QKVPacked")
        ]
        close(functions[0].apply(q, k, v, *both, *options, *more, True), right.view_as(q))
        close(functions[1].apply(q, kv, *both, *options, True), right.view_as(q))
        close(functions[2].apply(all_in_one, *one, *options, True), right.view_as(q))


# ---------------------------------------------------------------- num_splits, later than 2.8.3

PAGED = dict(
    q=randn(2, 4, 16, seed=1), k=randn(4, 8, 2, 16, seed=2), v=randn(4, 8, 2, 16, seed=3),
    cu_seqlens_q=cumulative(1, 1), cu_seqlens_k=cumulative(9, 16), max_seqlen_q=1, max_seqlen_k=16, dropout_p=0.0,
    softmax_scale=0.25, causal=True, block_table=torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
)  # fmt: skip
FLAT = dict(
    q=randn(25, 4, 16), k=randn(25, 2, 16), v=randn(25, 2, 16), cu_seqlens_q=cumulative(9, 16), block_table=None
)
SEVERAL = "num_splits > 1 is not supported"
OTHERS = [
    dict(q=randn(2, 2, 16)), dict(max_seqlen_q=2), dict(window_size_left=3), dict(window_size_right=0),
    dict(alibi_slopes=torch.ones(4)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "numbers", "refused"),
    [
        ({}, (0, 1, 2, 128), {129: "num_splits > 128 not supported"}),
        *((options, (0, 1), {2: SEVERAL}) for options in OTHERS),
        (dict(dropout_p=0.1), (), {2: SEVERAL}),
        (FLAT | dict(max_seqlen_q=16), (0, 2), {}),
    ],
)
def test_only_single_queries_of_grouped_heads_over_pages_take_any_number_of_splits(
    options: dict[str, Any], numbers: tuple[int, ...], refused: dict[int, str]
) -> None:
    right = _flash_attn_varlen_forward(**PAGED | options)
    for number in numbers:
        found = _flash_attn_varlen_forward(**PAGED | options, num_splits=number)
        assert all(map(torch.equal, found[:3], right))
    for number, message in refused.items():
        with pytest.raises(RuntimeError, match=message):
            _flash_attn_varlen_forward(**PAGED | options, num_splits=number)


# ---------------------------------------------------------------- outside autograd

DENSE = dict(zip("qkv", qkv(sq=5, sk=9, h=4, hk=2)))
LENGTHS = dict(cu_seqlens_q=cumulative(4, 6), cu_seqlens_k=cumulative(11, 7), max_seqlen_q=6, max_seqlen_k=11)
PACKED = {name: x.flatten(0, 1) for name, x in DENSE.items()} | LENGTHS
FORMS: dict[str, dict[str, Any]] = {"": DENSE, "_varlen": PACKED}


def recorded(values: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors that ask for gradients."""
    wants = {name: isinstance(x, Tensor) and x.is_floating_point() for name, x in values.items()}
    return {name: x.detach().requires_grad_() if wants[name] else x for name, x in values.items()}


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", ["plain", "causal_alibi"])
def test_nothing_is_recorded_and_gradients_through_a_forward_are_flash_attns_error(
    backend: str, form: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callers' gradients stay leaves, of a compiled backward too."""
    if backend == "fused":
        fused_on_cpu.emulate(monkeypatch)
    forward, backward = (getattr(flash_attn_interface, f"_flash_attn{form}_{name}") for name in ("forward", "backward"))
    dtype, saved = torch.float16 if backend == "fused" else torch.float32, []
    values: dict[str, Any] = FORMS[form] | {name: FORMS[form][name].to(dtype) for name in "qkv"} | RULES | MASKS[mask]

    def run(values: dict[str, Any], backward: Any = backward) -> tuple[Tensor, ...]:
        out, lse, *rest = on_backend(backend, forward, **values, return_softmax=False)
        grads = dict(zip(("dq", "dk", "dv"), empty_grads(*(values[name].detach() for name in "qkv"))))
        upstream = recorded({"dout": out.detach().cos(), "out": out, "softmax_lse": lse, "deterministic": False})
        return out, lse, rest[0], on_backend(backend, backward, **values, **upstream, **grads), *grads.values()

    right = run(values)
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        answers = [run(recorded(values))]
        if (backend, mask) == ("reference", "plain"):  # a graph calls the same operator whoever serves it
            answers.append(run(recorded(values), torch.compile(backward, backend="eager")))
    for found in answers:
        close(found[3], right[3], 16)  # softmax_d: kernels and operators add up in another order
        alike = [index for index in range(len(right)) if index != 3]
        assert all(torch.equal(found[index], right[index]) for index in alike)
        assert not any(x.requires_grad for x in found[3:])
        for result in found[:2]:
            with pytest.raises(RuntimeError, match=r"[Tt]rying to backward through .* no autograd formula was regist"):
                result.sum().backward()
    assert not saved
