"""Custom operators for torch.compile, traces, dispatch modes and tensors without memory. Eager calls do not use them.

Each operator takes the tensors and scalars of an eager call, so a graph holds one opaque node per attention, with known
shapes. Gradients and the LSE are left out if tracing shows that they are not used. The forward takes the dropout's
rng_state as a tensor drawn by torch.randint. Compilers, checkpoints and vmap know that torch.randint is random: a
recomputation gets the same numbers, and two draws are never merged into one.
The operators' namespace is flash_attn_compat, because flash_attn:: belongs to flash-attn.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn_compat import settings
from flash_attn_compat.core import checks, dropout, overlap
from flash_attn_compat.core.arguments.build import with_page_lengths
from flash_attn_compat.core.arguments.options import CHECKS
from flash_attn_compat.core.call import BackwardInputs, Gradients, lse_dtype
from flash_attn_compat.core.entry import PLAIN
from flash_attn_compat.core.features import DMASK, Feature
from flash_attn_compat.core.inputs import CacheInputs, DenseInputs, Inputs, Options, PackedInputs
from flash_attn_compat.core.kernel_layout import round_up
from flash_attn_compat.core.torch_state import is_jit_traced, with_autograd
from flash_attn_compat.dispatch import serve
from flash_attn_compat.dispatch.autograd import (
    differentiable_gradients,
    gradient_of_lse,
    gradient_of_slopes,
    is_wrapped,
)
from flash_attn_compat.dispatch.pytorch import observers, sharding

_LSE = int(Feature.LSE)


def forward(x: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, softmax_lse, S_dmask, rng_state); outputs that tracing shows to be unused have no elements.

    options.use: only LSE and DMASK are read; the other bits are computed from the tensors
    """
    q, k, v, slopes = x.q, x.k, x.v, x.alibi_slopes
    arguments, trains_slopes = _flatten(x, options), observers.are_trained(slopes)
    drops = arguments[_DROPOUT_P] > 0.0
    return_lse, return_dmask = bool(options.use & _LSE), bool(options.use & DMASK) and drops
    theirs = under_flash_attns_name
    if theirs is not None and not (trains_slopes or is_compiling() or is_jit_traced()):
        # flash-attn's operators draw the dropout mask inside. In a graph of make_fx a compiler may merge two of them.
        draws_in_graph = drops and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        if PLAIN.issuperset(map(type, (q, k, v))) and not draws_in_graph:
            found = theirs(arguments, return_dmask)
            if found is not None:
                return found
    needs_grad = trains_slopes or _gradients_follow(q, k, v)
    asked = return_lse or needs_grad, return_dmask, needs_grad
    rng_state = _draw_rng_state(q) if drops else None
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] = _forward_op(*arguments, *asked, rng_state)
    return outputs


def _draw_rng_state(q: Tensor) -> Tensor:
    """Return rng_state of a new dropout mask, (2,) int64."""
    if not is_compiling() and is_jit_traced():  # the traced module may later run on another device
        return dropout.rng_state_beside(q)
    return dropout.new_rng_state(q.device)


def _gradients_follow(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a backward may follow. Under torch.jit.trace always: the recording may be trained later."""
    asks = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return asks or (not is_compiling() and is_jit_traced())


# Set by dropin/operators.py to a function that computes ``forward`` by the operators of torch.ops.flash_attn. It
# returns None for a call that these operators cannot express.
under_flash_attns_name: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor] | None] | None = None


def backward(x: Inputs, options: Options, upstream: BackwardInputs) -> Gradients:
    """Return dq, dk and dv as new tensors."""
    # Unpacked and not sliced, because Dynamo of PyTorch 2.6 cannot slice a NamedTuple.
    dout, out, softmax_lse, rng_state, _, _ = upstream
    return Gradients(*backward_op(dout, out, softmax_lse, rng_state, None, *_flatten(x, options)))


# The operators' arguments: the tensors, then max_seqlen_q and max_seqlen_k if they are tensors, then the numbers.
_NAMED = [name for name in PackedInputs._fields if name != "rng_state"]
_LONGEST = {"max_seqlen_q_tensor": "max_seqlen_q", "max_seqlen_k_tensor": "max_seqlen_k"}
_NOT_TAKEN = {"use", "rotary_interleaved", "num_splits", "has_rows", "has_length"}
_NUMBERS = {name: kind for name, kind in typing.get_type_hints(Options).items() if name not in _NOT_TAKEN}
_NUMBERS |= {"softcap": float, "max_seqlen_q": int, "max_seqlen_k": int}
NAMES = *_NAMED, *_LONGEST, *_NUMBERS
_SLOPES, _DROPOUT_P = NAMES.index("alibi_slopes"), NAMES.index("dropout_p")
_COUNT = len(NAMES)
# The checks of numbers, without integers: the operator's schema checks these, and they may be a compiler's symbols.
_CHECKS = {name: CHECKS[name] for name, kind in _NUMBERS.items() if kind in (float, bool)}


def _flatten(x: Inputs, options: Options) -> tuple[Any, ...]:
    """Return the operators' arguments. max_seqlen stays a tensor if it is one, so that tracing need not read it."""
    if type(x) is DenseInputs:  # Dynamo of PyTorch 2.4 cannot read its class attributes, which _NAMED includes
        x = PackedInputs(x.q, x.k, x.v, x.alibi_slopes)
    tensors = [getattr(x, name) for name in _NAMED]
    longest = [getattr(options, name) for name in _LONGEST.values()]
    numbers = [_operator_number(name, getattr(options, name)) for name in _NUMBERS]
    sharding.check_call(zip(_NAMED, tensors), checks.number("dropout_p", options.dropout_p))
    return *tensors, *[one if isinstance(one, Tensor) else None for one in longest], *numbers


def _operator_number(name: str, value: Any) -> Any:
    if name in _CHECKS:
        return _CHECKS[name](name, value)
    return 0 if name in ("max_seqlen_q", "max_seqlen_k") and isinstance(value, Tensor) else value


def _find(arguments: Sequence[Any], use: int) -> tuple[Inputs, Options]:
    """Return the inputs and options of a call from the operators' arguments."""
    named = dict(zip(NAMES, arguments))
    numbers = {name: named[name] for name in _NUMBERS}
    numbers |= {name: named[as_tensor] for as_tensor, name in _LONGEST.items() if named[as_tensor] is not None}
    options = Options(use=use, **numbers)
    if named["cu_seqlens_q"] is None:
        return DenseInputs(named["q"], named["k"], named["v"], named["alibi_slopes"]), options
    x: Inputs = with_page_lengths(PackedInputs(**{name: named[name] for name in _NAMED}))
    return x, options


SPELLINGS: dict[Any, str] = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool"}
SPELLINGS |= {kind | None: f"{spelling}?" for kind, spelling in SPELLINGS.items()}
SPELLINGS[int | Tensor | None] = "Tensor?"  # an int has an argument of its own


def schema(kinds: Mapping[str, Any]) -> str:
    """Return the argument list of an operator's schema, from the arguments' names and types."""
    return ", ".join(f"{SPELLINGS[kind]} {name}" for name, kind in kinds.items())


_SCHEMA = schema(dict.fromkeys(NAMES, Tensor | None) | dict.fromkeys("qkv", Tensor) | _NUMBERS)


@torch.library.custom_op(
    "flash_attn_compat::attention",
    mutates_args=(),
    # rng_state: (2,) int64, the dropout mask. None, as in older exported graphs, makes the operator draw one.
    schema=f"({_SCHEMA}, bool return_lse, bool return_dmask, bool needs_grad, Tensor? rng_state=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return_lse, return_dmask, needs_grad, rng_state = _asked(arguments)
    # The backward chooses its backend anew, so the dropout mask must be one that every backend can draw.
    use = Feature.SHARED_DROPOUT_MASK | (Feature.BACKWARD if needs_grad else 0)
    use |= (Feature.LSE if return_lse else 0) | (DMASK if return_dmask else 0)
    # A copy: the call returns its rng_state, and a custom operator must not return an argument.
    copy = None if rng_state is None else rng_state.clone(memory_format=torch.contiguous_format)
    x: Any
    x, options = _find(arguments, use)
    out, lse, dmask, rng_state = serve.run_outside_autograd(x._replace(rng_state=copy), options)
    return out.contiguous(), lse, dmask, rng_state


def _asked(arguments: Sequence[Any]) -> tuple[bool, bool, bool, Tensor | None]:
    """Return (return_lse, return_dmask, needs_grad, rng_state). PyTorch omits rng_state if it is None, its default."""
    return_lse, return_dmask, needs_grad, rng_state = (*arguments[_COUNT:], None)[:4]
    return return_lse, return_dmask, needs_grad, rng_state


@_forward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, (return_lse, return_dmask, _, _) = dict(zip(NAMES, arguments)), _asked(arguments)
    q, k, v, starts_q = x["q"], x["k"], x["v"], x["cu_seqlens_q"]
    rows, keys = ((x[name], x[f"{name}_tensor"]) for name in ("max_seqlen_q", "max_seqlen_k"))
    if starts_q is None:
        rows, keys = (q.shape[1], None), (k.shape[1], None)
    lengths = (_rounded_length(*rows), _rounded_length(*keys)) if return_dmask else None
    return unwritten(q, v, starts_q, return_lse, lengths)


def _rounded_length(number: int, tensor: Tensor | None) -> Any:
    """Return a length rounded up to 128. A length in a tensor is unknown while compiling: return a symbolic size."""
    return round_up(number, 128) if tensor is None else torch.library.get_ctx().new_dynamic_size()


def unwritten(
    q: Tensor, v: Tensor, starts_q: Tensor | None, return_lse: bool, dmask: tuple[Any, Any] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty results of a forward, for compilers. dmask: the numbers of rows and keys of S_dmask, or None"""
    per_sequence = (q.shape[0] if starts_q is None else starts_q.shape[0] - 1, q.shape[-2])
    lse_shape = (*per_sequence, q.shape[1]) if starts_q is None else (q.shape[1], q.shape[0])
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse_shape if return_lse else 0, dtype=lse_dtype(q.dtype)),
        q.new_empty(0 if dmask is None else (*per_sequence, *dmask)),
        q.new_empty(2, dtype=torch.int64),
    )


@torch.library.custom_op(
    "flash_attn_compat::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor softmax_lse, Tensor? rng_state, Tensor? dlse, {_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
)
def backward_op(
    dout: Tensor, out: Tensor, softmax_lse: Tensor, rng_state: Tensor | None, dlse: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    x, options = _find(arguments, _BACKWARD)
    upstream = BackwardInputs(dout, out, softmax_lse, rng_state, dlse=gradient_of_lse(dlse, softmax_lse))
    _, derived = serve.gradients(serve.find(x, options), serve.backward_inputs(x, rng_state), upstream)
    dq, dk, dv = derived.gradients
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


_BACKWARD = Feature.BACKWARD | Feature.LSE | Feature.SHARED_DROPOUT_MASK | Feature.GIVEN_LSE


@backward_op.register_fake
def _(
    dout: Tensor, out: Tensor, softmax_lse: Tensor, rng_state: Tensor | None, dlse: Tensor | None, q: Tensor,
    k: Tensor, v: Tensor, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op(
    "flash_attn_compat::alibi_slopes_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? rng_state, Tensor? dlse, {_SCHEMA}) -> Tensor",
)
def slopes_backward_op(dout: Tensor, rng_state: Tensor | None, dlse: Tensor | None, *arguments: Any) -> Tensor:
    x, options = _find(arguments, _BACKWARD)
    call = serve.find(x, options).call.over(serve.backward_inputs(x, rng_state))
    with with_autograd():
        return gradient_of_slopes(call, dout, dlse).detach()


@slopes_backward_op.register_fake
def _(dout: Tensor, rng_state: Tensor | None, dlse: Tensor | None, *arguments: Any) -> Tensor:
    slopes: Tensor = arguments[_SLOPES]
    return slopes.new_empty(slopes.shape)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    _, _, needs_grad, _ = _asked(inputs)
    ctx.count, ctx.is_expected, ctx.used = len(inputs), needs_grad, settings.used_backend()
    inputs = inputs[:_COUNT]
    # Save the returned rng_state. A checkpoint may keep ``out`` and draw the argument again, with another result.
    out, lse, _, rng_state = output
    ctx.scalars = tuple(None if isinstance(value, Tensor) else value for value in inputs)
    ctx.save_for_backward(out, lse, rng_state, *(value if isinstance(value, Tensor) else None for value in inputs))
    ctx.set_materialize_grads(False)


def _compiled_backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return tuple([None] * ctx.count)
    if not ctx.is_expected:
        raise RuntimeError(
            "this graph was traced where no gradients were recorded, and kept nothing to compute them from"
        )
    out, lse, rng_state, *tensors = ctx.saved_tensors
    inputs = [scalar if tensor is None else tensor for scalar, tensor in zip(ctx.scalars, tensors)]
    with settings.using_backend(ctx.used):
        dout = torch.zeros_like(out) if dout is None else dout
        if torch.is_grad_enabled() or is_wrapped(dout) or is_wrapped(dlse):  # create_graph, or batched by vmap
            if sharding.is_distributed(dout):
                sharding.refuse("second derivatives")
            wanted = ctx.needs_input_grad[_SLOPES], *ctx.needs_input_grad[:3]
            of_slopes, *gradients = differentiable(dout, dlse, rng_state, inputs, wanted)
        else:
            of_slopes, gradients = None, list(backward_op(dout, out, lse, rng_state, dlse, *inputs))
            if ctx.needs_input_grad[_SLOPES]:
                of_slopes = slopes_backward_op(dout, rng_state, dlse, *inputs)
    others: list[Tensor | None] = [None] * (ctx.count - 3)
    others[_SLOPES - 3] = of_slopes
    return *gradients, *others


_forward_op.register_autograd(_compiled_backward, setup_context=_setup_context)


def differentiable(
    dout: Tensor, dlse: Tensor | None, rng_state: Tensor | None, arguments: Sequence[Any], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Return gradients of the slopes, q, k and v that autograd can differentiate again; None for those not wanted.

    arguments: those of the operators
    """
    call = serve.differentiable_call(*_find(arguments, Feature.TRANSFORMS | Feature.LSE), rng_state)
    return differentiable_gradients((call.alibi_slopes, call.q, call.k, call.v), wanted, call, dout, dlse)


def _refuse_joint_graph(*arguments: Any, **named: Any) -> NoReturn:
    """Raise RuntimeError: a traced ``out`` no longer depends on q, k, v, so second derivatives would miss a part."""
    raise RuntimeError(
        "a traced graph that computes gradients of attention (flash_attn_compat::attention_backward) cannot be "
        "differentiated again: trace the forward alone and differentiate that, or differentiate without tracing"
    )


# ---- attention over a cache ------------------------------------------------------------------------------------------


def attend_over_cache(x: CacheInputs, options: Options, length: int | None) -> tuple[Tensor, Tensor]:
    """Return (out, softmax_lse) of a call over a cache, by one operator.

    softmax_lse has no elements unless options.use asks for it. The arguments are those of ``compute``.
    """
    rows, pages = (x.block_table, None) if options.has_rows else (None, x.block_table)
    results: tuple[Tensor, Tensor] = _kvcache_op(
        x.q, x.k, x.v, x.k_new, x.v_new, x.rotary_cos, x.rotary_sin, x.seqused_k, rows, x.leftpad_k, pages,
        x.alibi_slopes, options.softmax_scale, options.causal, options.window_size_left, options.window_size_right,
        options.softcap, options.rotary_interleaved, options.num_splits, x.k_descale, x.v_descale, options.k_factor,
        options.v_factor, length, bool(options.use & _LSE),
    )  # fmt: skip
    return results


@torch.library.custom_op(
    "flash_attn_compat::kvcache",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
    "Tensor? alibi_slopes, float? softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, bool rotary_interleaved, SymInt num_splits, Tensor? k_descale, Tensor? v_descale, float k_factor, "
    "float v_factor, SymInt? cache_seqlen, bool return_softmax_lse) -> (Tensor, Tensor)",
)
def _kvcache_op(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, rotary_cos: Tensor | None,
    rotary_sin: Tensor | None, cache_seqlens: Tensor | None, cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None, block_table: Tensor | None, alibi_slopes: Tensor | None,
    softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    rotary_interleaved: bool, num_splits: int, k_descale: Tensor | None, v_descale: Tensor | None, k_factor: float,
    v_factor: float, cache_seqlen: int | None, return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    has_rows = cache_batch_idx is not None
    x = CacheInputs(
        q, k_cache, v_cache, alibi_slopes, cache_seqlens, cache_leftpad, cache_batch_idx if has_rows else block_table,
        k_descale, v_descale, k, v, rotary_cos, rotary_sin,
    )  # fmt: skip
    options = Options(
        softmax_scale=softmax_scale, causal=causal, window_size_left=window_size_left,
        window_size_right=window_size_right, softcap=softcap, use=_LSE if return_softmax_lse else 0, k_factor=k_factor,
        v_factor=v_factor, rotary_interleaved=rotary_interleaved, num_splits=num_splits, has_rows=has_rows,
        has_length=cache_seqlen is not None,
    )  # fmt: skip
    result = serve.compute(x, options, cache_seqlen)[1]
    lse = result.lse.contiguous() if return_softmax_lse else q.new_empty(0, dtype=lse_dtype(q.dtype))
    return result.out.contiguous(), lse


@_kvcache_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, *arguments: object) -> tuple[Tensor, Tensor]:
    if k is not None and k.shape[1]:  # check now: at run time a compiler may pass copies, which never overlap
        overlap.refuse("k_cache", k_cache)
        overlap.refuse("v_cache", v_cache)
    batch, seqlen_q, nheads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, nheads, v_cache.shape[-1]))
    *_, return_softmax_lse = arguments
    lse_shape = (batch, nheads, seqlen_q) if return_softmax_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


# ---- refusals --------------------------------------------------------------------------------------------------------

for operator in (backward_op, slopes_backward_op):
    operator.register_autograd(_refuse_joint_graph)
for operator in (_forward_op, backward_op, slopes_backward_op):
    observers.refuse_transforms(operator, observers.refuse_in_graphs)
observers.refuse_transforms(_kvcache_op, observers.refuse_private)

sharding.register_if_needed()  # at import, since a compiled call cannot do it while traced
