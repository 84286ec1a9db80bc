"""Print graphs of aten operators as the C++ functions that the kernels call for every score."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from flash_attn_compat.core.flex.caps import is_soft_cap, name_of
from flash_attn_compat.core.flex.capture import (
    MASK_ARGUMENTS,
    SCORE_ARGUMENTS,
    Captured,
    IntegerArgument,
    TensorArgument,
)
from flash_attn_compat.core.flex.gradients import find_additions
from flash_attn_compat.core.flex.operators import (
    C_TYPES,
    CONSTANT,
    FULL,
    IGNORED_KEYWORDS,
    INTEGER_OPERATORS,
    LOADS,
    OPERATORS,
    PREDICATES,
    SAME,
    Declined,
    converted,
    division_factor,
    literal,
    rounded_beside,
)
from flash_attn_compat.core.flex.printed import Bound, Number, Printed
from flash_attn_compat.core.flex.ranges import EXACT_FLOAT, MOST_INDEX, Ranges
from flash_attn_compat.core.flex.sight import print_sight
from flash_attn_compat.core.flex.steepness import find_bound, find_known

MOST_CAPTURED, MOST_DIMS, MOST_NUMBERS = 16, 4, 8  # sizes of FlexParams; also in backends/fused/flex.py


class _View(NamedTuple):
    """A captured tensor, partly indexed. axes: those without an index yet; offset: C++ terms of the other axes."""

    tensor: int
    dtype: torch.dtype
    axes: tuple[int, ...]
    offset: tuple[str, ...] = ()


class _Value(NamedTuple):
    """A C++ name or literal, and its type."""

    text: str
    c_type: str


_SIGNATURE = "const FlexParams &f, {}int b, int h, int q, int kv"
_NO_SCORE = "DEVICE float {}(const FlexParams &, float score, int, int, int, int) {{ return {}; }}\n"
_GRADIENTS = """constexpr int FLEX_SUMS = {};
DEVICE void flex_gradients(const FlexParams &f, FlexSum (&sums)[FLEX_SUMS], float dscore, float score, int b, int h,
                           int q, int kv) {{
{}}}
"""
_STEEPEST = """#define FLEX_STEEPEST
DEVICE float flex_steepest(const FlexParams &f, int b, int h) {{
{}{}  return {};
}}
"""
_NO_MASK = "DEVICE bool flex_mask(const FlexParams &, int, int, int, int) { return true; }\n"


def print_functions(score: Captured, mask: Captured, joint: Captured | None = None) -> Printed:
    """Return the C++ text of a call's functions, which backends/fused/flex.py lists, and which arguments it reads.

    joint: for a backward, the joint graph of score_mod, PyTorch's own or by ``capture_joint``. Raises Declined.
    """
    table = _Table()
    score_text = slope_text = mask_text = None
    gradients_text, gradients = "", tuple[int, ...]()
    if not _is_identity(score):
        score_text = table.print("flex_score", _SIGNATURE.format("float score, "), "float", score)
        if joint is not None:
            slope = joint._replace(names=(*SCORE_ARGUMENTS, "1.f"))
            slope_text = table.print("flex_slope", _SIGNATURE.format("float score, "), "float", slope)
            slope_text += table.print_steepest(slope)
            gradients_text, gradients = table.print_gradients(joint)
    if not _is_always_true(mask):
        mask_text = table.print("flex_mask", _SIGNATURE.format(""), "bool", mask)
        mask_text += print_sight(mask, _output(mask))
    parts = (
        score_text or _NO_SCORE.format("flex_score", "score"),
        slope_text or _NO_SCORE.format("flex_slope", "1.f"),
        mask_text or _NO_MASK, gradients_text,
    )  # fmt: skip
    return Printed(
        '#include "scores/flex_operators.cuh"\n' + "".join(parts), tuple(table.tensors), tuple(table.numbers),
        tuple(sorted(table.bounds)), tuple(sorted(table.indexed)), score_text is not None, mask_text is not None,
        gradients,
    )  # fmt: skip


def _output(captured: Captured) -> Any:
    """Return the first output of a graph."""
    (output,) = (node for node in captured.graph.graph.nodes if node.op == "output")
    result = output.args[0]
    return result[0] if isinstance(result, (tuple, list)) else result


def _is_identity(score: Captured) -> bool:
    return bool(_output(score) is next(iter(score.graph.graph.nodes)))


def _is_always_true(mask: Captured) -> bool:
    result = _output(mask)
    if not isinstance(result, Node) or result.op != "call_function":
        return False
    name = _operator_name(result)
    return CONSTANT.get(name) == 1 or (name in FULL and result.args[FULL[name]] is True)


def _operator_name(node: Node) -> str:
    """Return the name of an aten operator or a prim. Raises Declined for any other function."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims"):
        return str(target._opname)
    if target is operator.getitem:
        return "getitem"
    raise Declined(f"the function {getattr(target, '__name__', target)}")


class _Table:
    """Captured tensors and numbers in the order in which the functions of one text read them."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.numbers: list[Number] = []
        self.bounds: set[Bound] = set()
        self.indexed: set[tuple[int, int]] = set()

    def print(self, name: str, arguments: str, result: str, captured: Captured) -> str:
        function = _Function(self)
        value = function.run(captured)
        returned = converted(value.text, value.c_type, result)
        return f"DEVICE {result} {name}({arguments}) {{\n{function.body()}  return {returned};\n}}\n"

    def print_steepest(self, slope: Captured) -> str:
        """Return the text of flex_steepest, "" if the slope has no known bound."""
        function, output = _Function(self), _output(slope)
        function.compute(slope, find_known(slope, output))
        bound = find_bound(slope, output, lambda x: function._as(x, "float"))
        return "" if bound is None else _STEEPEST.format(function.body(), *bound)

    def print_gradients(self, joint: Captured) -> tuple[str, tuple[int, ...]]:
        """Return the text of flex_gradients, and the indices into ``tensors`` of those to whose gradients it adds."""
        additions = find_additions(joint)
        if not additions:
            return "", ()
        function = _Function(self)
        function.compute(joint, [node for each in additions for node in (*each.indices, each.value)])
        places = [self.add_tensor(each.argument) for each in additions]
        order = list(dict.fromkeys(places))
        for number, (place, each) in enumerate(zip(places, additions)):
            function.add(f"sums[{number}], {order.index(place)}", place, each.indices, each.value)
        return _GRADIENTS.format(len(additions), function.body()), tuple(order)

    def add_tensor(self, argument: TensorArgument) -> int:
        if argument.dims > MOST_DIMS:
            raise Declined(f"a captured tensor of {argument.dims} axes: our kernels take {MOST_DIMS} at most")
        return _place(argument.position, self.tensors, MOST_CAPTURED, "captured tensors")

    def add_number(self, position: int, is_float: bool = False, is_on_host: bool = False) -> int:
        return _place(
            Number(position, is_float, is_on_host), self.numbers, MOST_NUMBERS, "captured numbers that may change"
        )


def _place(entry: Any, entries: list[Any], most: int, words: str) -> int:
    if entry not in entries:
        entries.append(entry)
    if len(entries) > most:
        raise Declined(f"more than {most} {words}")
    return int(entries.index(entry))


class _Function:
    """Prints one graph as the body of a C++ function, with a line for each operator that the output needs."""

    def __init__(self, table: _Table) -> None:
        self.table = table
        self.lines: list[str] = []
        self.values: dict[Node, _View | _Value] = {}
        self.ranges = Ranges()
        self.floats: dict[Node, str] = {}  # C++ names of integers that were converted to float

    def run(self, captured: Captured) -> _Value:
        output = _output(captured)
        if output is None:
            return _Value("0.f", "float")  # the result does not depend on the score
        self.compute(captured, [output])
        return self._value(output)

    def compute(self, captured: Captured, outputs: Sequence[Any]) -> None:
        """Print a line for every node that ``outputs`` depend on."""
        needed = _needed(outputs)
        arguments = iter((*captured.names, *captured.arguments))
        for node in captured.graph.graph.nodes:
            if node.op == "placeholder":
                argument = next(arguments)
                if node in needed:
                    self.values[node] = self._argument(argument)
                    if argument in ("q", "kv"):
                        self.ranges.found[node] = (0, MOST_INDEX - 1)
            elif node in needed:
                self.values[node] = self._attribute(captured, node) if node.op == "get_attr" else self._call(node)

    def body(self) -> str:
        return "".join(f"  {line}\n" for line in self.lines)

    def add(self, arguments: str, tensor: int, indices: Sequence[Any], value: Any) -> None:
        """Print a call of flex_add: add ``value`` to the contiguous gradient of captured tensor number ``tensor``."""
        offset = "(i64)0"
        for axis, index in enumerate(indices):
            offset = f"({offset} * f.size[{tensor}][{axis}] + {self._index(tensor, axis, index)})"
        self.lines.append(f"flex_add(f, {arguments}, {offset}, {self._as(value, 'float')});")

    def _argument(self, argument: str | TensorArgument | IntegerArgument) -> _View | _Value:
        if isinstance(argument, str):
            return _Value(argument, "int" if argument in MASK_ARGUMENTS else "float")
        if isinstance(argument, IntegerArgument):
            return _Value(f"f.numbers[{self.table.add_number(argument.position)}]", "i64")
        c_type = C_TYPES[argument.dtype]
        if argument.on_host:
            is_float = c_type == "float"
            number = f"f.numbers[{self.table.add_number(argument.position, is_float, True)}]"
            text = f"__int_as_float((int){number})" if is_float else converted(number, "i64", c_type)
            return self._assign(text, c_type)
        view = _View(self.table.add_tensor(argument), argument.dtype, tuple(range(argument.dims)))
        return view if view.axes else self._load(view)

    def _attribute(self, captured: Captured, node: Node) -> _Value:
        """Return a constant that the graph holds. Raises Declined unless it is one number in CPU memory."""
        value = captured.graph
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_cpu or value.dtype not in C_TYPES:
            raise Declined("a constant tensor inside the function: capture it instead")
        c_type = C_TYPES[value.dtype]
        return _Value(literal(value.detach().item(), c_type), c_type)

    def _assign(self, text: str, c_type: str) -> _Value:
        name = f"v{len(self.lines)}"
        self.lines.append(f"const {c_type} {name} = {text};")
        return _Value(name, c_type)

    def _load(self, view: _View) -> _Value:
        c_type = C_TYPES[view.dtype]
        offset = " + ".join(view.offset) or "(i64)0"
        return self._assign(f"({c_type}){LOADS[view.dtype]}(f, {view.tensor}, {offset})", c_type)

    def _indexed(self, view: _View, taken: dict[int, Any]) -> _View | _Value:
        """Index a view's axes (``taken``: indices by place in view.axes); load the number if no axis is left."""
        offset = list(view.offset)
        for place, index in taken.items():
            axis = view.axes[place]
            text = self._index(view.tensor, axis, index)
            offset.append(f"(i64)({text}) * f.stride[{view.tensor}][{axis}]")
        left = tuple(axis for place, axis in enumerate(view.axes) if place not in taken)
        view = view._replace(axes=left, offset=tuple(offset))
        return view if left else self._load(view)

    def _index(self, tensor: int, axis: int, index: Any) -> str:
        value = self._value(index, "int")
        if value.c_type in ("bool", "float", "u8"):
            raise Declined("a captured tensor indexed by a mask, not by integers")
        if value.text in MASK_ARGUMENTS:
            self.table.bounds.add(Bound(tensor, axis, value.text))
            return value.text
        self.table.indexed.add((tensor, axis))
        text = converted(value.text, value.c_type, "int")
        if value.c_type == "i64":  # clamp to int without wrapping; flex_within then keeps the index inside the tensor
            text = f"(int)op_minimum(op_maximum({value.text}, (i64)-2147483647LL), (i64)2147483647LL)"
        return f"flex_within({text}, f.size[{tensor}][{axis}])"

    def _value(self, x: Any, c_type: str = "float") -> _Value:
        """Return a node's value, or a literal of ``c_type``."""
        if not isinstance(x, Node):
            if not isinstance(x, (bool, int, float)):
                raise Declined(f"an argument that is a {type(x).__name__}")
            return _Value(literal(x, c_type), c_type)
        value = self.values[x]
        if isinstance(value, _View):
            raise Declined("a captured tensor that is not indexed by as many indices as it has axes")
        return value

    def _as(self, x: Any, c_type: str) -> str:
        value = self._value(x, c_type)
        if c_type == "float" and value.c_type in ("int", "i64"):
            return self._float_of(x)
        return converted(value.text, value.c_type, c_type)

    def _float_of(self, x: Node) -> str:
        """Return an integer as a float, computed in fp32 from its arguments where that is exact.

        That is faster: q - kv as floats needs one conversion per row and column; as an integer, one per score.
        """
        found = self.floats.get(x)
        if found is not None:
            return found
        value, (low, high) = self._value(x), self.ranges.of(x)
        function = _EXACT_IN_FLOAT.get(name_of(x)) if x.op == "call_function" and not x.kwargs else None
        if not -EXACT_FLOAT <= low <= high <= EXACT_FLOAT:
            text = converted(value.text, value.c_type, "float")
        elif function is not None and all(map(self._is_exact, x.args)):
            text = f"{function}({', '.join(self._float_or_literal(each) for each in x.args)})"
        elif low >= 0 and high < MOST_INDEX:
            text = f"op_index_to_float((int){value.text})"
        else:
            text = converted(value.text, value.c_type, "float")
        self.floats[x] = found = self._assign(text, "float").text
        return found

    def _is_exact(self, x: Any) -> bool:
        """Whether an argument is an integer that fp32 holds."""
        low, high = self.ranges.of(x)
        is_integer = not isinstance(x, Node) or self._value(x).c_type in ("int", "i64")
        return is_integer and -EXACT_FLOAT <= low <= high <= EXACT_FLOAT

    def _float_or_literal(self, x: Any) -> str:
        return self._float_of(x) if isinstance(x, Node) else literal(x, "float")

    def _call(self, node: Node) -> _View | _Value:
        if node.op != "call_function":
            raise Declined(f"a {node.op.replace('_', ' ')} inside the function")
        example = node.meta.get("val")
        if isinstance(example, (torch.SymInt, int)) and not isinstance(example, bool):
            return self._integer(node)
        name = _operator_name(node)
        first = self.values.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if isinstance(first, _View) and name not in CONSTANT:
            return self._of_view(name, first, node)
        if not isinstance(example, Tensor):
            raise Declined(f"the operator {name}")
        if example.dim():
            raise Declined(f"the operator {name}, whose result is no single number")
        if example.dtype not in C_TYPES:
            raise Declined(f"the operator {name} in {str(example.dtype).removeprefix('torch.')}")
        return self._print_operator(name, node, C_TYPES[example.dtype])

    def _of_view(self, name: str, view: _View, node: Node) -> _View | _Value:
        args = node.args
        if name == "index":
            indices: Any = args[1]
            return self._indexed(view, {i: index for i, index in enumerate(indices) if index is not None})
        if name == "select" and isinstance(args[1], int):
            return self._indexed(view, {args[1] % len(view.axes): args[2]})
        if name in ("alias", "detach", "lift_fresh_copy", "clone"):
            return view
        raise Declined(f"the operator {name} of a captured tensor: compute it before")

    def _integer(self, node: Node) -> _Value:
        """Print an operator on captured integers."""
        name = getattr(node.target, "__name__", "")
        function = INTEGER_OPERATORS.get(name)
        if function is None or node.kwargs:
            raise Declined(f"{name} of a captured integer")
        return self._assign(f"{function}({', '.join(self._as(x, 'i64') for x in node.args)})", "i64")

    def _print_operator(self, name: str, node: Node, c_type: str) -> _Value:
        args, keywords = node.args, {k: v for k, v in node.kwargs.items() if k not in IGNORED_KEYWORDS}
        if name == "view" and getattr(node.target, "_overloadname", "") == "dtype":
            raise Declined("the bits of a number as another dtype")
        if name in SAME or name in FULL:
            return self._assign(self._as(args[FULL.get(name, 0)], c_type), c_type)
        if name in CONSTANT:
            return _Value(literal(CONSTANT[name], c_type), c_type)
        name, args = self._spelt_out(name, node, keywords, c_type)
        rule = OPERATORS.get(name)
        if rule is None or keywords:
            raise Declined(f"the operator {name}" + f" with {', '.join(keywords)}" * bool(keywords))
        args = (args[0], args[0]) if name == "square" else args
        if len(args) != len(rule.operands):
            raise Declined(f"the operator {name} of {len(args)} arguments")
        types = {"R": c_type, "F": "float", "B": "bool", "C": self._common(args) if "C" in rule.operands else ""}
        if rule.operands == "CC":
            args = rounded_beside(*args), rounded_beside(*args[::-1])
        operands = [self._as(x, types[kind]) for x, kind in zip(args, rule.operands)]
        text = f"{rule.function}({', '.join(operands)})"
        returns_bool = rule.operands in ("CC", "BB", "B") or name in PREDICATES
        return self._assign(converted(text, "bool", c_type) if returns_bool else text, c_type)

    def _spelt_out(self, name: str, node: Node, keywords: dict[str, Any], c_type: str) -> tuple[str, tuple[Any, ...]]:
        """Return name and arguments of the table's operator for one with options; remove these from ``keywords``."""
        args = node.args
        if name in ("add", "sub", "rsub"):
            left, right, *more = args
            alpha = keywords.pop("alpha", more[0] if more else 1)
            left, right = (right, left) if name == "rsub" else (left, right)
            if alpha != 1:
                scaled = f"op_mul({self._as(args[1 if name != 'rsub' else 0], c_type)}, {self._as(alpha, c_type)})"
                right = self._temporary(scaled, c_type)
            return ("add" if name == "add" else "sub"), (left, right)
        if name == "div":
            mode = keywords.pop("rounding_mode", None)
            if mode:
                return {"floor": "floor_divide", "trunc": "divide_trunc"}[mode], args
            factor = division_factor(args[1], exact=not set(map(name_of, node.users)) <= _SMOOTH)
            return ("true_divide", args) if factor is None else ("mul", (args[0], factor))
        if name == "clamp":
            low, high = (*args[1:], None, None)[:2]
            low, high = keywords.pop("min", low), keywords.pop("max", high)
            if low is not None and high is not None:
                return "clamp_max", (
                    self._temporary(f"op_maximum({self._as(args[0], c_type)}, {self._as(low, c_type)})", c_type),
                    high,
                )
            return ("clamp_max", (args[0], high)) if low is None else ("clamp_min", (args[0], low))
        if name in ("clamp_min", "clamp_max"):
            bound = keywords.pop("min", keywords.pop("max", None))
            return name, args if bound is None else (args[0], bound)
        if name == "masked_fill":
            return "where", (args[1], args[2], args[0])
        if name == "pow" and c_type == "float" and isinstance(args[1], (int, float)):
            return self._power(args[0], float(args[1]))
        if name == "tanh" and is_soft_cap(node):
            return "tanh_near", args
        return name, args

    def _power(self, x: Any, exponent: float) -> tuple[str, tuple[Any, ...]]:
        if exponent == 2.0:
            return "mul", (x, x)
        if exponent == 3.0:
            return "mul", (self._temporary(f"op_mul({self._as(x, 'float')}, {self._as(x, 'float')})", "float"), x)
        if exponent == 0.5:
            return "sqrt", (x,)
        return "pow", (x, exponent)

    def _temporary(self, text: str, c_type: str) -> Node:
        """Assign the C++ expression ``text`` to a new variable, and return a node that stands for it."""
        node = Node(torch.fx.Graph(), "temporary", "placeholder", "temporary", (), {})
        node.meta["val"] = torch.empty((), dtype=_DTYPES[c_type], device="meta")
        self.values[node] = self._assign(text, c_type)
        return node

    def _common(self, args: Iterable[Any]) -> str:
        """Return the type in which PyTorch compares two values."""
        examples = [x.meta["val"] if isinstance(x, Node) else x for x in args]
        examples = [0 if isinstance(x, torch.SymInt) else x for x in examples]
        if not any(isinstance(x, Tensor) for x in examples):
            return "i64"
        found = C_TYPES.get(torch.result_type(*examples))
        if found is None:
            raise Declined("a comparison in fp64")
        return found


# Functions that are exact in fp32, as in integers, as long as arguments and results are at most EXACT_FLOAT.
_EXACT_IN_FLOAT = {
    "add": "op_add", "sub": "op_sub", "mul": "op_mul", "neg": "op_neg", "abs": "op_abs", "relu": "op_relu",
    "minimum": "op_minimum", "maximum": "op_maximum",
}  # fmt: skip
# Operators whose result changes by no more than an ulp if their argument, a quotient, is off by an ulp.
_SMOOTH = {"tanh", "sigmoid", "exp", "output"}
_DTYPES = {c_type: dtype for dtype, c_type in C_TYPES.items()}  # "float" is fp32's, its last entry


def _needed(outputs: Sequence[Any]) -> set[Node]:
    """Return all nodes that ``outputs`` depend on, with themselves."""
    found: set[Node] = set()
    left = [output for output in outputs if isinstance(output, Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [] if name_of(node) in CONSTANT else node.all_input_nodes
    return found
