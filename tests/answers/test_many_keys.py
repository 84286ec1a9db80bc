"""Sums over very many keys in one block: the rounding of fp32 and of the tensor cores."""

from __future__ import annotations

import pytest

from tests.kernels import emulate, truncation

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


@pytest.mark.parametrize("decodes", [False, True])
def test_a_rows_sum_drifts_by_no_factor_from_one_tile_of_keys_to_the_next(decodes: bool) -> None:
    found = truncation.errors(truncation.problem(2**14, "float16", 0.0), False, decodes)
    assert found["softmax_lse"].error < 3e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_truncation_losses_of_one_sided_values_are_within_the_bound(dtype: str) -> None:
    rounding, truncating = (
        truncation.errors(truncation.problem(2**14, dtype, 1.0), truncates) for truncates in (False, True)
    )
    assert rounding["out"].error < truncating["out"].error < truncating["out"].bound / 2


def test_the_command_prints_the_errors_of_rounding_and_truncation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["truncation", "--keys", "100"])
    assert truncation.main() == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "rounding, truncating, allowed" in head and len(rows) == 4
