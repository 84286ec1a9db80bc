"""`triton_op`: a custom operator from a function, with a schema if one is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.library import custom_op


def triton_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    allow_decomposition: bool = True,
) -> Any:
    """`torch.library.triton_op` that takes a schema (torch's ignores it).

    Args:
        name: "namespace::name".
        fn: the implementation, which must be traceable, since it serves as its own fake kernel; without it a
            decorator is returned.
        mutates_args, schema: as `torch.library.custom_op`.
        allow_decomposition: accepted. The compiler calls the operator as a whole; the values are the same.
    """

    def register(function: Callable[..., Any]) -> Any:
        operator = custom_op(name, function, mutates_args=mutates_args, schema=schema)
        operator.register_fake(function)
        return operator

    return register if fn is None else register(fn)
