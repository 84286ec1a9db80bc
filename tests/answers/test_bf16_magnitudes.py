"""bf16 as scaled fp16 is as exact as plain bf16 at any magnitude: the table of docs/exactness.md, of fewer tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.kernels import emulate, magnitudes

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


@pytest.mark.parametrize("sizes", magnitudes.MAGNITUDES[::5], ids=str)
def test_errors_are_at_most_twice_those_of_plain_bf16(sizes: Sequence[float]) -> None:
    assert max(magnitudes.error_ratios(sizes, tokens=40)) <= 2
