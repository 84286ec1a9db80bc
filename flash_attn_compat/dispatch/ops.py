"""Custom operators for torch.compile, traces, dispatch modes and tensors without memory.

Each operator makes the same request as an eager call, so a graph holds one opaque node per attention, with known
shapes. Gradients and the LSE are left out where tracing shows that they are not used. The forward takes the dropout's
rng_state as a tensor drawn by torch.randint. Compilers, checkpoints and vmap know that torch.randint is random: a
recomputation gets the same numbers, and two draws are never merged into one.
The namespace is flash_attn_compat, for flash_attn:: belongs to flash-attn. Eager calls use no operator.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flash_attn_compat import settings
from flash_attn_compat.core import checks, dropout
from flash_attn_compat.core.arguments import TRANSFORMED, Options, Packing, Purpose, request_of
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, Gradients
from flash_attn_compat.core.prepared import PLAIN, Request
from flash_attn_compat.core.scores import round_up
from flash_attn_compat.core.torch_state import count_modes, tracing_state, transforms_are_on, with_autograd
from flash_attn_compat.core.varlen import lse_dtype
from flash_attn_compat.dispatch import flops, op_derivatives, serve, sharding
from flash_attn_compat.dispatch.autograd import (
    are_trained,
    are_transformed,
    differentiable_gradients,
    gradient_of_lse,
    gradient_of_slopes,
)


def must_be_one_operator(tensors: tuple[Any, ...]) -> bool:
    """Whether a call must be one operator: under torch.compile, torch.jit.trace or a dispatch mode, or on a subclass.

    Dispatch modes are fake tensors, selective checkpointing, counters and the like; a subclass may have no memory for a
    kernel to read. Transforms of torch.func differentiate plain operators instead.
    """
    if is_compiling():
        return True
    is_seen = count_modes() or tracing_state() is not None or not PLAIN.issuperset(map(type, tensors))
    return bool(is_seen) and _are_seen(tensors)


def must_be_one_operator_without_derivatives(*tensors: Any) -> bool:
    """The same for functions that have no derivatives. Raises where a transform asks for one."""
    if is_compiling():
        return True
    if (transforms_are_on() or forward_ad._current_level >= 0) and are_transformed(tensors):
        op_derivatives.refuse_private()
    is_seen = count_modes() or tracing_state() is not None or not PLAIN.issuperset(map(type, tensors))
    return bool(is_seen) and _are_seen(tensors)


def _are_seen(tensors: tuple[object, ...]) -> bool:
    """Whether operators are intercepted by a mode, a trace or a tensor's class; if not, tensors have memory."""
    if (transforms_are_on() or forward_ad._current_level >= 0) and are_transformed(tensors):
        return False
    if any([isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors]):
        return False  # the checks refuse nested tensors by name; an operator would not
    flops.register_if_needed()
    sharding.register_if_needed()
    return count_modes() > 0 or tracing_state() is not None or any(map(_has_dispatch, tensors))


def _has_dispatch(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, softmax_lse, S_dmask), differentiable; the latter two have elements with options.return_attn_probs.

    return_lse: softmax_lse has elements in any case
    """
    return_probs = options.return_attn_probs
    return_dmask = return_probs and options.dropout_p > 0.0
    out, lse, dmask, _ = forward(q, k, v, options, packing, return_dmask, return_probs or return_lse)
    return out, lse, dmask


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    packing: Packing | None = None,
    return_dmask: bool = False,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, softmax_lse, S_dmask, rng_state); outputs that tracing shows to be unused have no elements."""
    _check(q, k, v, options, packing)
    arguments, trains_slopes = _flatten(options, packing), are_trained(options.alibi_slopes)
    drops = arguments[_DROPOUT_P] > 0.0
    may_be_theirs = not trains_slopes and _only_modes_look_on(q, k, v)
    if under_flash_attns_name is not None and may_be_theirs and not (drops and _goes_into_graph()):
        found = under_flash_attns_name(q, k, v, Arguments(*arguments), return_dmask)
        if found is not None:
            return found
    needs_grad = trains_slopes or _gradients_follow(q, k, v)
    asked = return_lse or needs_grad, return_dmask, needs_grad
    rng_state = _draw_rng_state(q) if drops else None
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] = _forward_op(q, k, v, *arguments, *asked, rng_state)
    return outputs


def _draw_rng_state(q: Tensor) -> Tensor | None:
    """Return rng_state of a new dropout mask, (2,) int64; None for DTensors, whose sharding rule refuses dropout."""
    if type(q) not in PLAIN and hasattr(q, "placements"):  # in this order: Dynamo of PyTorch 2.4 cannot trace hasattr
        return None
    if not is_compiling() and tracing_state() is not None:  # a saved module may go to another device
        return dropout.rng_state_beside(q)
    return dropout.new_rng_state(q.device)


def _check(q: Tensor, k: Tensor, v: Tensor, *others: Options | Packing | BackwardInputs | None) -> None:
    """Refuse nested and sparse tensors by name; PyTorch's own error would name no argument."""
    if not is_compiling():
        named = {name: value for other in others if other is not None for name, value in other._asdict().items()}
        checks.are_dense({"q": q, "k": k, "v": v, **named})


def _only_modes_look_on(*tensors: Tensor) -> bool:
    return not is_compiling() and tracing_state() is None and PLAIN.issuperset(map(type, tensors))


def _goes_into_graph() -> bool:
    """Whether make_fx records the call. flash-attn's operators draw inside, so a compiler may merge two of them."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _gradients_follow(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a backward may follow. Under torch.jit.trace always: the recording may be trained later."""
    asks = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return asks or (not is_compiling() and tracing_state() is not None)


# Set by dropin/operators.py: ``forward`` by the operators of torch.ops.flash_attn, or None where these cannot say it.
under_flash_attns_name: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor] | None] | None = None


def backward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, upstream: BackwardInputs, packing: Packing | None = None
) -> Gradients:
    """Return dq, dk and dv as new tensors."""
    _check(q, k, v, options, packing, upstream)
    # Unpacked, for in PyTorch 2.6 Dynamo can't slice a NamedTuple.
    dout, out, softmax_lse, rng_state, _, _ = upstream
    return Gradients(*backward_op(dout, out, softmax_lse, rng_state, None, q, k, v, *_flatten(options, packing)))


_UNPACKED = None, None, 0, 0, None, None, None  # as Packing


def _flatten(options: Options, packing: Packing | None) -> tuple[Any, ...]:
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, _ = options
    scalars = (
        checks.number("dropout_p", dropout_p), softmax_scale, checks.causal(causal),
        *checks.two_bounds(window_size), checks.softcap(softcap), bool(deterministic),
    )  # fmt: skip
    cu_q, cu_k, max_q, max_k, block_table, seqused_k, leftpad_k = _UNPACKED if packing is None else packing
    # A longest length given as a tensor stays one, so that tracing does not have to read it.
    numbers = [0 if isinstance(value, Tensor) else value for value in (max_q, max_k)]
    tensors = [value if isinstance(value, Tensor) else None for value in (max_q, max_k)]
    return cu_q, cu_k, block_table, seqused_k, leftpad_k, alibi_slopes, *numbers, *tensors, *scalars


class Arguments(NamedTuple):
    """The ops' arguments after the tensors q, k and v, in order."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    block_table: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None
    alibi_slopes: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    max_seqlen_q_tensor: Tensor | None
    max_seqlen_k_tensor: Tensor | None
    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float
    deterministic: bool

    def request(self, q: Tensor, k: Tensor, v: Tensor, purpose: Purpose) -> Request:
        window_size = self.window_size_left, self.window_size_right
        options = Options(
            self.dropout_p, self.softmax_scale, self.causal, window_size, self.softcap, self.alibi_slopes,
            self.deterministic,
        )  # fmt: skip
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return request_of(q, k, v, options, purpose)
        longest_q = self.max_seqlen_q if self.max_seqlen_q_tensor is None else self.max_seqlen_q_tensor
        longest_k = self.max_seqlen_k if self.max_seqlen_k_tensor is None else self.max_seqlen_k_tensor
        others = self.block_table, self.seqused_k, self.leftpad_k
        packing = Packing(self.cu_seqlens_q, self.cu_seqlens_k, longest_q, longest_k, *others)
        return request_of(q, k, v, options, purpose, packing)


_DROPOUT_P = Arguments._fields.index("dropout_p")


class Asked(NamedTuple):
    """The forward's arguments after those.

    rng_state: (2,) int64, describes the dropout mask. With None the operator draws one: graphs saved by earlier
        versions lack the argument.
    """

    return_lse: bool
    return_dmask: bool
    needs_grad: bool
    rng_state: Tensor | None = None


def _split(arguments: tuple[Any, ...]) -> tuple[Arguments, Asked]:
    """The operator's arguments after q, k and v. PyTorch leaves out the last one if it has its default."""
    count = len(Arguments._fields)
    return Arguments(*arguments[:count]), Asked(*arguments[count:])


SPELLINGS: dict[Any, str] = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool"}
SPELLINGS |= {kind | None: f"{spelling}?" for kind, spelling in SPELLINGS.items()}
SPELLINGS[int | Tensor | None] = "Tensor?"  # the int goes by an argument of its own


def schema(arguments: type) -> str:
    """The fields of a NamedTuple as an operator's schema names its arguments."""
    return ", ".join(f"{SPELLINGS[kind]} {name}" for name, kind in arguments.__annotations__.items())


@torch.library.custom_op(
    "flash_attn_compat::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {schema(Arguments)}, {schema(Asked)}=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given, (return_lse, return_dmask, needs_grad, rng_state) = _split(arguments)
    # The backward finds its backend anew, so the dropout mask has to be one that any of them can draw.
    purpose = Purpose(needs_grad, return_lse, return_dmask, shares_dropout_mask=True)
    request = given.request(q, k, v, purpose)
    if rng_state is not None:  # copied, since an operator must not return its argument
        request = serve.with_rng_state(request, rng_state.clone(memory_format=torch.contiguous_format))
    out, lse, dmask, rng_state = serve.whole(request)
    return out.contiguous(), lse, dmask, rng_state


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, (return_lse, return_dmask, _, _) = _split(arguments)
    rows, keys = (x.max_seqlen_q, x.max_seqlen_q_tensor), (x.max_seqlen_k, x.max_seqlen_k_tensor)
    if x.cu_seqlens_q is None:
        rows, keys = (q.shape[1], None), (k.shape[1], None)
    lengths = (_rounded_length(*rows), _rounded_length(*keys)) if return_dmask else None
    return unwritten(q, v, x.cu_seqlens_q, return_lse, lengths)


def _rounded_length(number: int, tensor: Tensor | None) -> Any:
    """A length that a tensor holds is known at run time only; a symbolic size stands for it until then."""
    return round_up(number, 128) if tensor is None else torch.library.get_ctx().new_dynamic_size()


def unwritten(
    q: Tensor, v: Tensor, starts_q: Tensor | None, return_lse: bool, dmask: tuple[Any, Any] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A forward's results, as compilers are told of them. dmask: the rows and keys of S_dmask, None without it"""
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
    schema="(Tensor dout, Tensor out, Tensor softmax_lse, Tensor? rng_state, Tensor? dlse, Tensor q, Tensor k, "
    f"Tensor v, {schema(Arguments)}) -> (Tensor, Tensor, Tensor)",
)
def backward_op(
    dout: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    rng_state: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    purpose = Purpose(needs_grad=True, return_lse=True, shares_dropout_mask=True, given_lse=True)
    request = Arguments(*arguments).request(q, k, v, purpose)
    known = serve.find(request)
    upstream = BackwardInputs(dout, out, softmax_lse, rng_state, dlse=gradient_of_lse(dlse, softmax_lse))
    _, derived = serve.gradients(known, serve.backward_tensors(request.tensors, rng_state), upstream)
    dq, dk, dv = derived.gradients
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@backward_op.register_fake
def _(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    rng_state: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op(
    "flash_attn_compat::alibi_slopes_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? rng_state, Tensor? dlse, Tensor q, Tensor k, Tensor v, {schema(Arguments)})"
    " -> Tensor",
)
def slopes_backward_op(
    dout: Tensor, rng_state: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> Tensor:
    purpose = Purpose(needs_grad=True, return_lse=True, shares_dropout_mask=True, given_lse=True)
    request = Arguments(*arguments).request(q, k, v, purpose)
    call = serve.find(request).call
    call = call.with_tensors(*serve.backward_tensors(request.tensors, rng_state))
    with with_autograd():
        return gradient_of_slopes(call, dout, dlse).detach()


@slopes_backward_op.register_fake
def _(
    dout: Tensor, rng_state: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> Tensor:
    slopes = Arguments(*arguments).alibi_slopes
    assert slopes is not None
    return slopes.new_empty(slopes.shape)


_SLOPES = 3 + Arguments._fields.index("alibi_slopes")  # behind q, k and v


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    arguments, asked = _split(inputs[3:])
    ctx.count, ctx.is_expected, ctx.used = len(inputs), asked.needs_grad, settings.used_backend()
    inputs = *inputs[:3], *arguments
    # The returned rng_state, not the argument: a checkpoint may keep ``out`` and draw the argument anew.
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
        if torch.is_grad_enabled():  # they are differentiated again
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
    dout: Tensor, dlse: Tensor | None, rng_state: Tensor | None, inputs: Sequence[Any], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients of the slopes, q, k and v, where each is wanted, that can be differentiated again.

    inputs: q, k, v and the fields of Arguments
    """
    call = _differentiable_call(inputs, rng_state)
    return differentiable_gradients((call.alibi_slopes, *call[:3]), wanted, call, dout, dlse)


def _differentiable_call(inputs: Sequence[Any], rng_state: Tensor | None) -> AttentionCall:
    q, k, v, *rest = inputs
    return serve.differentiable_call(
        Arguments(*rest).request(q, k, v, TRANSFORMED._replace(return_lse=True)), rng_state
    )


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the operator, of differentiable operators."""
    given, (return_lse, return_dmask, _, rng_state) = _split(arguments)
    purpose = TRANSFORMED._replace(return_lse=return_lse, return_dmask=return_dmask)
    request = given.request(q, k, v, purpose)
    if rng_state is not None:
        request = serve.with_rng_state(request, rng_state)
    out, lse, dmask, rng_state = serve.whole(request)
    return out.contiguous(), lse, dmask, rng_state


def _plain_backward(
    dout: Tensor, out: Tensor, softmax_lse: Tensor, rng_state: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor, *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same of the backward."""
    upstream = BackwardInputs(dout, out, softmax_lse, rng_state, dlse=gradient_of_lse(dlse, softmax_lse))
    call = _differentiable_call((q, k, v, *arguments), rng_state)
    dq, dk, dv = serve.plain_gradients(call, upstream)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _plain_slopes_backward(dout: Tensor, rng_state: Tensor | None, dlse: Tensor | None, *inputs: Any) -> Tensor:
    """The same of the slopes' backward."""
    return gradient_of_slopes(_differentiable_call(inputs, rng_state), dout, dlse).detach()


def _refuse_joint_graph(*arguments: Any, **named: Any) -> NoReturn:
    """A traced out has lost what it was computed from, so that derivatives would silently miss a part."""
    raise RuntimeError(
        "a traced graph that computes gradients of attention (flash_attn_compat::attention_backward) cannot be "
        "differentiated again: trace the forward alone and differentiate that, or differentiate without tracing"
    )


op_derivatives.serve_transforms(_forward_op, _plain_forward)
for operator, plain in ((backward_op, _plain_backward), (slopes_backward_op, _plain_slopes_backward)):
    operator.register_autograd(_refuse_joint_graph)
    op_derivatives.refuse_derivatives(operator, _refuse_joint_graph, under_vmap=plain)

sharding.register_if_needed()  # for compiled calls, which cannot while they are traced
