"""The caller's default device and dtype never reach our tensors: each factory call names both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flash_attn_compat

PACKAGE = Path(flash_attn_compat.__file__).parent
# Tests of the caller's state see the stand-ins for kernels under it, too.
STAND_INS = Path(__file__).parents[1] / "answers" / "others_kernels.py"
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros", "hann_window", "tril_indices",
    "triu_indices", "from_file", "normal", "empty_permuted",
}  # fmt: skip
# Whose dtype is that of whole numbers they are given, whatever the default is.
OF_WHOLE_NUMBERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}


def test_every_tensor_factory_names_device_and_dtype() -> None:
    complaints = [
        f"{path}:{line}: {complaint}"
        for path in [*PACKAGE.rglob("*.py"), STAND_INS]
        for line, complaint in complaints_of(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.empty(2, pin_memory=True)", 2),
        ("torch.empty(2, dtype=d)", 1),
        ("torch.tensor([1], device=d)", 1),
        ("torch.arange(3, device=d)", 0),
        ("torch.arange(3.0, device=d)", 1),
        ("make = torch.zeros\nmake(3)", 1),
        ("functools.partial(torch.arange, device=d)", 0),
        ("functools.partial(torch.zeros, device=d)", 1),
        ("torch.zeros_like(x)", 0),
    ],
)
def test_the_rule_finds_planted_violations(source: str, count: int) -> None:
    assert len(list(complaints_of(ast.parse(source)))) == count


def complaints_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    called = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function, *given = [call.func, *call.args]
        if isinstance(function, ast.Attribute) and function.attr == "partial" and given:
            function, *given = given
        called.add(function)
        name, keywords = _factory(function), {keyword.arg for keyword in call.keywords}
        if name is None or None in keywords:  # **what the caller of ours said
            continue
        if "device" not in keywords:
            yield call.lineno, f"torch.{name} without a device"
        is_whole = name in OF_WHOLE_NUMBERS and not any(_is_fraction(argument) for argument in given)
        if "dtype" not in keywords and not is_whole:
            yield call.lineno, f"torch.{name} without a dtype"
    for node in set(ast.walk(tree)) - called:
        if _factory(node) is not None:
            yield node.lineno, f"torch.{_factory(node)} under another name, where nobody sees what it is given"


def _factory(node: ast.AST) -> str | None:
    """The name of a factory of torch's, if ``node`` is one."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr if node.attr in FACTORIES else None
    return None


def _is_fraction(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in ast.walk(node))
