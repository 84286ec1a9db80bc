"""Every operator of the table against PyTorch: NaN, infinities, negative zero, integers' signs and overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.core.flex import operators
from flash_attn_compat.core.flex.operators import OPERATORS, Declined
from tests.flex import on_host
from tests.flex.on_host import Problem, Results
from tests.kernels import emulate

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason="no g++ compiles for the CPU here")

Function = Callable[..., Any]
INF, NAN = float("inf"), float("nan")
FLOATS = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.25, 1e-3, 1e-30, 80.0, -80.0, 1e6, 3e38, INF, -INF, NAN]
)
INTEGERS = torch.tensor([0, 1, -1, 2, -2, 3, 7, -7, 40, 127, -128, 32767, -32768, 2**31 - 1, -(2**31), 2**40, -(2**63)])
UNARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in (
        "neg", "abs", "sign", "sgn", "relu", "floor", "ceil", "trunc", "round", "exp", "exp2", "expm1", "log", "log2",
        "log10", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "asin", "acos", "atan",
        "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "square",
    )},
    "tanh_near": lambda x: torch.tanh(x / 3.0),
}  # fmt: skip
PREDICATES: dict[str, Function] = {
    "isnan": torch.isnan, "isinf": torch.isinf, "isneginf": torch.isneginf, "isposinf": torch.isposinf,
    "signbit": torch.signbit, "logical_not": torch.logical_not,
}  # fmt: skip
BINARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in (
        "add", "sub", "mul", "floor_divide", "remainder", "fmod", "minimum", "maximum", "fmin", "fmax", "pow", "atan2",
        "hypot", "copysign", "true_divide",
    )},
    "divide_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
    "where": lambda x, y: torch.where(x > y, x, y),
    "tanh_backward": torch.ops.aten.tanh_backward, "sigmoid_backward": torch.ops.aten.sigmoid_backward,
    "threshold_backward": lambda x, y: torch.ops.aten.threshold_backward(x, y, 0.5),
}  # fmt: skip
COMPARISONS: dict[str, Function] = {
    name: getattr(torch, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor")
}
INTEGER_UNARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("neg", "abs", "sign", "relu", "bitwise_not", "square")},
    **{name: getattr(torch, name) for name in ("floor", "ceil", "trunc", "round")},
}
INTEGER_BINARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in (
        "add", "sub", "mul", "floor_divide", "remainder", "fmod", "minimum", "maximum", "bitwise_and", "bitwise_or",
        "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "pow",
    )},
    "divide_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "__and__": lambda x, y: x & y, "__or__": lambda x, y: x | y, "__xor__": lambda x, y: x ^ y,
    "__lshift__": torch.ops.aten.__lshift__, "__rshift__": torch.ops.aten.__rshift__,
    "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max, "where": lambda x, y: torch.where(x > y, x, y),
}  # fmt: skip
SHIFTS = "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"
DIVISIONS = "floor_divide", "remainder", "fmod", "divide_trunc"
DTYPES = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    left, right = torch.meshgrid(values, values, indexing="ij")
    return left.flatten().contiguous(), right.flatten().contiguous()


def rows(count: int) -> tuple[Tensor, ...]:
    """(b, h, q, kv) of which q counts."""
    zero = torch.zeros(count, dtype=torch.int32)
    return zero, zero, torch.arange(count, dtype=torch.int32), zero


def of_scores(function: Function, x: Tensor, *others: Tensor) -> Problem:
    """function(score, others[q]) for the scores ``x``."""

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *captured: Tensor) -> Tensor:
        return function(score, *(y[q] for y in captured)).to(torch.float32)

    return Problem(on_host.printed(mod, captured=others), x, rows(x.numel()), others)


def of_cases(function: Function, *cases: tuple[Tensor, ...]) -> Problem:
    """A mask: where function(*case) equals PyTorch's in every case; integers are compared as integers."""
    given = [x for case in cases for x in (*case, function(*case))]
    length, count = max(map(len, given)), len(cases[0]) + 1
    given = [x[torch.arange(length) % len(x)] for x in given]

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *tensors: Tensor) -> Tensor:
        holds = q >= 0
        for first in range(0, len(tensors), count):
            *operands, right = (x[q] for x in tensors[first : first + count])
            holds = holds & (function(*operands) == right)
        return holds

    return Problem(on_host.printed(mask_mod=mod, captured=given), torch.zeros(length), rows(length), given)


def evaluate(problems: Mapping[str, Problem]) -> dict[str, Results]:
    found = on_host.evaluate([*problems.values()])
    assert not any(each.outside for each in found)
    return dict(zip(problems, found, strict=True))


def check_scores(
    functions: Mapping[str, Function], operands: Callable[[str], tuple[Tensor, ...]], rtol: float = 0, atol: float = 0
) -> None:
    """Each function of operands(name) is PyTorch's, by default in every bit but of zeros and NaN."""
    found = evaluate({name: of_scores(function, *operands(name)) for name, function in functions.items()})
    for name, function in functions.items():
        right = function(*operands(name)).float()
        torch.testing.assert_close(
            found[name].scores, right, rtol=rtol, atol=atol, equal_nan=True, msg=lambda words: f"{name}: {words}"
        )


def check_cases(functions: Mapping[str, Function], cases: Callable[[str], Iterable[tuple[Tensor, ...]]]) -> None:
    """Each function is PyTorch's for every case."""
    found = evaluate({name: of_cases(function, *cases(name)) for name, function in functions.items()})
    assert [name for name, each in found.items() if not bool(each.masks.all())] == []


NEAR: dict[str, Any] = {"rtol": 3e-6, "atol": 3e-7}


def test_functions_of_a_float_are_pytorchs() -> None:
    tame = FLOATS[(FLOATS.abs() < 1e5) | ~FLOATS.isfinite()]  # PyTorch's vectors round others in their own way
    own_vectors = "sin", "cos", "tan", "sinh", "cosh", "log1p"  # log1p(3e38) is inf in PyTorch 2.6
    check_scores(UNARY, lambda name: (tame if name in own_vectors else FLOATS,), **NEAR)


def test_functions_of_two_floats_are_pytorchs() -> None:
    x, y = pairs(FLOATS)
    # Where a quotient has more digits than a float, libraries round it differently.
    keep = ~((x.abs() > 1e5) & (y.abs() < 1e3)) & ~((y.abs() > 1e5) & y.isfinite()) & (y.abs() != 1e-30)
    check_scores(BINARY, lambda name: (x[keep], y[keep]) if name in (*DIVISIONS, "pow") else (x, y), **NEAR)


def test_questions_about_a_float_are_pytorchs() -> None:
    check_scores(PREDICATES, lambda name: (FLOATS,))


def test_comparisons_of_floats_are_pytorchs() -> None:
    check_scores(COMPARISONS, lambda name: pairs(FLOATS))


def test_functions_of_an_integer_are_pytorchs() -> None:
    check_cases(INTEGER_UNARY, lambda name: [(INTEGERS.to(dtype),) for dtype in DTYPES])


def integer_pairs(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The pairs of integers for which PyTorch's versions and devices agree."""
    x, y = pairs(INTEGERS.to(dtype))
    keep = torch.ones_like(x, dtype=torch.bool)
    if name in DIVISIONS:  # by zero PyTorch raises an error here; the smallest by -1 traps in some of its versions
        keep = (y != 0) & ((y != -1) | (x != torch.iinfo(dtype).min))
    if name in SHIFTS:
        keep = (y >= 0) & (y < torch.iinfo(dtype).bits)
    if name == "pow":
        keep = y >= 0
    return x[keep], y[keep]


def test_functions_of_two_integers_are_pytorchs() -> None:
    check_cases(INTEGER_BINARY, lambda name: [integer_pairs(name, dtype) for dtype in DTYPES])


def test_comparisons_of_two_types_are_pytorchs() -> None:
    x, y = pairs(INTEGERS)
    types = (torch.int64, torch.float32), (torch.int8, torch.int64), (torch.bool, torch.int32)
    check_cases(COMPARISONS, lambda name: [(x.to(one), y.to(other)) for one, other in types])


def test_numbers_compared_with_a_16_bit_tensor_are_rounded_as_pytorch_rounds_them() -> None:
    functions: dict[str, Function] = {
        "a float": lambda x: x == 0.1, "a bound": lambda x: x >= 1 / 3, "an integer": lambda x: x == 257,
        "more than its dtype holds": lambda x: x == 1e39,
    }  # fmt: skip
    values = torch.tensor([0.1, 1 / 3, 256.0, 257.0, INF, -INF, NAN])
    check_cases(functions, lambda name: [(values.to(dtype),) for dtype in (torch.float16, torch.bfloat16)])


def test_negative_floats_wrap_as_bytes_though_a_gpu_makes_them_zero() -> None:
    assert operators.converted("x", "float", "u8") == "(u8)(i64)(x)"


def test_functions_of_two_booleans_are_pytorchs() -> None:
    names = "bitwise_and", "bitwise_or", "bitwise_xor", "add", "mul", "minimum", "maximum"
    check_cases({name: getattr(torch, name) for name in names}, lambda name: [pairs(torch.tensor([False, True]))])


def test_every_operator_of_the_table_has_a_test() -> None:
    tested = {*UNARY, *PREDICATES, *BINARY, *COMPARISONS, *INTEGER_UNARY, *INTEGER_BINARY}
    assert tested == {*OPERATORS}


OPTIONS: dict[str, Function] = {
    "add with alpha": lambda x: torch.add(x, x * x, alpha=-3),
    "sub with alpha": lambda x: torch.sub(x, x * x, alpha=0.5),
    "rsub with alpha": lambda x: torch.rsub(x, 4.0, alpha=3),
    "a clamp between bounds": lambda x: x.clamp(-1, 2.5),
    "a clamp whose bounds cross": lambda x: x.clamp(3.0, -1.0),
    "a clamp from below": lambda x: x.clamp(min=0.25),
    "a clamp from above": lambda x: x.clamp(max=0.25),
    "a clamp by numbers that are computed": lambda x: torch.clamp(x, x * 0 - 1, x * 0 + 1),
    "a division by three": lambda x: x / 3,
    "a division by eight": lambda x: x / 8,
    "a division by zero": lambda x: x / 0.0,
    "a tiny divisor": lambda x: x / 1e-40,
    "a cube": lambda x: x**3,
    "a fourth root": lambda x: x**0.25,
    "a root": lambda x: x**0.5,
    "an inverse square": lambda x: x**-2,
    "a power of two": lambda x: 2**x,
    "masked_fill": lambda x: x.masked_fill(x > 1, -2.0),
    "an infinite literal": lambda x: torch.where(x > 0, x, -INF),
    "a NaN": lambda x: torch.where(x > 0, x, NAN),
    "a constant tensor": lambda x: torch.where(x > 0, x, torch.tensor(0.1)),
    "silu": F.silu, "gelu": F.gelu, "softplus": F.softplus, "leaky_relu": F.leaky_relu, "hardtanh": F.hardtanh,
    "elu": F.elu, "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "a cast to int and back": lambda x: x.clamp(-100, 100).nan_to_num(0.0).int().float(),
    "a cast to bool": lambda x: x.bool(),
    "a logarithm of a tanh of something small": lambda x: torch.log(8 * torch.tanh((x * 1e-9) / 3.0)),
    "a rounded quotient of a tanh": lambda x: torch.div(torch.tanh(x / -3.0), 0.5, rounding_mode="floor"),
    "a tanh of something small, enlarged twice": lambda x: 1000 * (1000 * torch.tanh((x * 1e-9) / 3.0)),
    "a tanh of something small, times alpha": lambda x: torch.add(x * 0, torch.tanh((x * 1e-9) / 3.0), alpha=1e6),
    "a mask beside True and False": lambda x: torch.where((x > 1) == True, x < 3, False),  # noqa: E712
    "integers": lambda x: (x.clamp(-100, 100).nan_to_num(0.0).int() * 7) // 3 % 5,
}  # fmt: skip


def test_options_and_composed_operators_are_pytorchs() -> None:
    tame = FLOATS[FLOATS.abs() < 1e7]  # PyTorch's vectors differ from its numbers elsewhere
    check_scores(OPTIONS, lambda name: (FLOATS if name[:2] in ("a ", "an") else tame,), **NEAR)


_DIFFERENTIATED = "a clamp f", "silu", "gelu", "softplus", "elu"
SLOPES = {name: function for name, function in OPTIONS.items() if name.startswith(_DIFFERENTIATED)}
SLOPES["softcap"] = lambda x: 20 * torch.tanh(x / 20)
SLOPES["nothing of the score"] = lambda x: x.detach() * 0 + 3
SLOPES["a product"] = lambda x: x * torch.exp(-x * x)
SLOPES |= {"sigmoid": torch.sigmoid, "relu": torch.relu}


# Functions of the score, q and a number for each head, whose slopes have a known bound, here of 0.7.
BOUNDED: dict[str, Function] = {
    "a factor of heads": lambda x, q, t: x * t,
    "a cap of heads": lambda x, q, t: 20 * t * torch.tanh(x / 20) + q,
    "either factor": lambda x, q, t: torch.where(q > 90, x * 0.2, -x * t),
    "a factor for some heads": lambda x, q, t: torch.where(t > 0.5, x * t, x * 1e5),
    "a sum of sines": lambda x, q, t: torch.sin(x) * 0.3 - torch.sigmoid(x) * t + x.clamp(-3, 3) * torch.sin(q) * 0.1,
}


def test_slopes_are_pytorchs_derivatives() -> None:
    x = torch.linspace(-9, 9, 181).requires_grad_()
    factor = torch.tensor([0.7])

    def problem(function: Function) -> Problem:
        def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *heads: Tensor) -> Tensor:
            return function(score, q, heads[0][h]) if heads else function(score)

        captured = [factor] if function in BOUNDED.values() else []
        return Problem(on_host.printed(mod, captured=captured, slopes=True), x.detach(), rows(x.numel()), captured)

    found = evaluate({name: problem(function) for name, function in (SLOPES | BOUNDED).items()})
    for name, function in (SLOPES | BOUNDED).items():
        y = function(x, torch.arange(x.numel()), factor) if name in BOUNDED else function(x)
        right = torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)
        torch.testing.assert_close(
            found[name].slopes, right, rtol=1e-5, atol=4e-6, msg=lambda words: f"{name}: {words}"
        )
        most = found[name].steepest
        assert (right.abs() <= most * 1.00001 + 1e-6).all(), f"{name} is steeper than {most.max()}"
        assert name not in BOUNDED or (most <= 1.4).all(), f"{name} has the bound {most.max()}"


def reads(dims: int) -> tuple[Problem, Tensor]:
    """A function of tensors of every dtype and of ``dims`` axes, and PyTorch's scores."""
    torch.manual_seed(dims)
    names, sizes = ["b", "h", "q", "kv"][:dims], (2, 3, 5, 7)[:dims]
    tables = []
    for dtype in operators.LOADS:
        table = (torch.randn(tuple(2 * size for size in sizes)) * 50).to(dtype)
        tables.append(table[tuple(slice(1, None, 2) for _ in names)].movedim(0, -1) if dims else table)
    at = [torch.randint(0, size, (50,), dtype=torch.int32) for size in (2, 3, 5, 7)]

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *given: Tensor) -> Tensor:
        index = (b, h, q, kv)[:dims]
        for place, table in enumerate(given):
            number = table[(*index[1:], index[0])] if dims else table
            score = score * 0.5 + number.to(torch.float32) * (place + 1)
        return score

    right = mod(torch.zeros(50), *at, *(table if dims else table.expand(50) for table in tables))
    return Problem(on_host.printed(mod, captured=tables), torch.zeros(50), at, tables), right


def test_captured_tensors_of_any_dtype_rank_and_strides_are_read_as_pytorch_reads_them() -> None:
    made = [reads(dims) for dims in range(5)]
    found = evaluate({str(dims): problem for dims, (problem, _) in enumerate(made)})
    assert [torch.equal(each.scores, right) for each, (_, right) in zip(found.values(), made)] == [True] * 5


def test_indices_count_from_the_end_where_negative_and_never_leave_their_tensor() -> None:
    table, given = torch.randn(5), {}
    for dtype in (torch.int32, torch.int64):
        most = torch.iinfo(dtype)
        given[str(dtype)] = torch.tensor([0, 1, -1, -5, 4, 5, -6, most.max, most.min, 99], dtype=dtype)

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, x: Tensor, at: Tensor) -> Tensor:
        return score + x[at[q]]

    found = evaluate({
        name: Problem(on_host.printed(mod, captured=(table, at)), torch.zeros(10), rows(10), (table, at))
        for name, at in given.items()
    })  # fmt: skip
    for name, wanted in given.items():
        assert torch.equal(found[name].scores[:5], table[wanted[:5].long()])


DECLINED: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "i0": (lambda s, b, h, q, kv: s + torch.special.i0(s), ()),
    "sum": (lambda s, b, h, q, kv, x: s + x[q].sum(), (torch.ones(4, 4),)),
    "no single number": (lambda s, b, h, q, kv, x: s + x, (torch.ones(4),)),
    "compute it before": (lambda s, b, h, q, kv, x: s + x.float()[q], (torch.ones(4, dtype=torch.int32),)),
    "float64": (lambda s, b, h, q, kv, x: s + x[q].float(), (torch.ones(4, dtype=torch.float64),)),
    "in float64": (lambda s, b, h, q, kv: (s.double() * 2).float(), ()),
    "5 axes": (lambda s, b, h, q, kv, x: s + x[b, b, b, b, b], (torch.ones(2, 2, 2, 2, 2),)),
    "different captured integers": (lambda s, b, h, q, kv, n: s + 1 if n > 4 else s, (7,)),
    "captured float": (lambda s, b, h, q, kv, n: s + n, (7.5,)),
    "more than 16": (
        lambda s, b, h, q, kv, *x: s + sum(y[q] for y in x),
        tuple(torch.ones(3) for _ in range(17)),
    ),
    "constant tensor inside": (lambda s, b, h, q, kv: s + torch.tensor([1.0, 2.0])[q], ()),
    "as another dtype": (lambda s, b, h, q, kv: s + s.view(torch.int32), ()),
    "rand": (lambda s, b, h, q, kv: s + torch.rand(()), ()),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_other_functions_are_declined_with_a_reason(reason: str) -> None:
    function, captured = DECLINED[reason]
    with pytest.raises(Declined, match=reason):
        on_host.printed(function, captured=captured)


@pytest.mark.parametrize("name", ["bool", "u8", "i8", "i16", "int", "i64"])
def test_integer_literals_beyond_their_type_are_declined(name: str) -> None:
    with pytest.raises(Declined):
        operators.literal(float("inf"), name)
    if name != "bool":
        with pytest.raises(Declined):
            operators.literal(2**64, name)


INDEX_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a difference": lambda q, kv: (q - kv).abs() * 0.5,
    "a product": lambda q, kv: (q * 2 - kv * 3 + 1) * 0.25,
    "a product beyond fp32": lambda q, kv: (q * kv) * 1.0,
    "a product that wraps": lambda q, kv: torch.maximum(-(q * q), kv) * 0.5,
    "a maximum": lambda q, kv: -torch.maximum(q - 7, kv - q).float(),
    "a relu": lambda q, kv: torch.relu(kv - q) / 3.0,
    "a remainder": lambda q, kv: (q % 64 - kv // 64).float(),
    "int64": lambda q, kv: (q.long() - kv) * 0.125,
    "int16": lambda q, kv: (q.short() + 5).float(),
    "a comparison": lambda q, kv: ((q >= kv) + (kv > 3)).float(),
}


def test_integers_of_indices_become_the_floats_of_pytorch() -> None:
    """Up to the largest index: what fp32 computes exactly is converted before it is computed."""
    ends = torch.tensor([0, 1, 2, 63, 64, 4095, 70_000, 2**22 - 1, 2**22, 2**23 - 2, 2**23 - 1], dtype=torch.int32)
    rows_of, keys = pairs(ends)
    zero = torch.zeros_like(rows_of)

    def problem(function: Function) -> Problem:
        def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score + function(q, kv)

        return Problem(on_host.printed(mod), torch.zeros(zero.shape), (zero, zero, rows_of, keys))

    found = evaluate({name: problem(function) for name, function in INDEX_SCORES.items()})
    for name, function in INDEX_SCORES.items():
        assert torch.equal(found[name].scores, function(rows_of, keys).float()), name


# Masks of q and kv, and whether flex_sight is to know exactly what they show of a rectangle.
MASKS: list[tuple[Function, bool]] = [
    (lambda q, kv: q >= kv, True),
    (lambda q, kv: ~(q < kv), True),
    (lambda q, kv: q - kv <= 9, True),
    (lambda q, kv: (q >= kv) & (q - kv <= 30), False),
    (lambda q, kv: (q >= kv) | (kv < 7), False),
    (lambda q, kv: (kv - q).abs() <= 5, True),
    (lambda q, kv: q // 16 >= kv // 16, True),
    (lambda q, kv: q // 16 == kv // 16, False),
    (lambda q, kv: (q != 40) & (kv > 3), False),
    (lambda q, kv: -2 * q + kv.long() < torch.minimum(q, kv) - 20, False),
    (lambda q, kv: torch.maximum(q, kv) * 3 > 90, True),
    (lambda q, kv: (q % 7 == 0) | (q >= 50), False),
    (lambda q, kv: (q.to(torch.int8) * 4 > 0) & (kv >= q), False),
    (lambda q, kv: torch.add(q >= kv, kv >= 0, alpha=0), False),
    (lambda q, kv: (q + 2**24 - 2 < torch.full((), 2**24 + 1, dtype=torch.float32)) & (kv >= 0), False),
    (lambda q, kv: (q + 2**24 == torch.full((), 2**24 + 1, dtype=torch.float32)) & (kv >= 0), False),
]


def test_a_rectangle_of_scores_is_skipped_or_not_asked_only_where_each_score_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randint(0, 100, (2, 400), generator=generator).sort(0)[0] for _ in range(2))
    q[1, :40], kv[1, :40] = q[0, :40], kv[0, :40]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        found = h < 0
        for head, (shows, _) in enumerate(MASKS):
            found = found | ((h == head) & shows(q, kv))
        return found

    printed, zero = on_host.printed(mask_mod=mask), torch.zeros_like(q[0])
    rows, keys = torch.meshgrid(
        torch.arange(100, dtype=torch.int32), torch.arange(100, dtype=torch.int32), indexing="ij"
    )
    for head, (shows, is_exact) in enumerate(MASKS):
        sights, shown = on_host.evaluate_sights(printed, (zero, zero + head, *q, *kv)), shows(rows, keys)
        parts = [shown[a : b + 1, c : d + 1] for a, b, c, d in zip(*q.tolist(), *kv.tolist())]
        some, every = torch.tensor([bool(x.any()) for x in parts]), torch.tensor([bool(x.all()) for x in parts])
        assert not (some & (sights & 1 == 0)).any() and not (~every & (sights & 2 > 0)).any(), head
        assert not is_exact or torch.equal(sights, some.int() + 2 * every.int()), head


def test_nothing_is_said_of_rectangles_where_captured_tensors_decide() -> None:
    numbers = torch.arange(9)
    printed = on_host.printed(mask_mod=lambda b, h, q, kv, x: x[q] == x[kv], captured=[numbers])
    assert "FLEX_SIGHT" not in printed.text
