"""benchmarks.turing_sm.published: what both charts of a Titan RTX say, and how far the simulation is from them."""

from __future__ import annotations

import pytest

from benchmarks import turing_sm
from benchmarks.turing_sm import published
from benchmarks.turing_sm.published import PEER, TOKENS, clock_factors, compare, simulated_speed

CELLS = list(published.JUNE)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_kernels_of_one_panel_and_length_changed_alike_between_the_charts(cell):
    factors = clock_factors(cell).values()
    assert max(factors) / min(factors) < 1.08


def test_panels_and_lengths_changed_by_up_to_a_third_so_they_do_not_compare():
    factors = [factor for cell in CELLS for factor in clock_factors(cell).values()]
    assert min(factors) < 1.0 and max(factors) > 1.3


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_simulation_is_within_8_hundredths_of_both_charts_for_rivals_of_one_panel(tokens):
    alike = [found for found in compare(tokens) if found.alike]
    assert len(alike) == 2
    assert all(max(found.distances) < 0.08 for found in alike)


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_simulation_is_within_8_hundredths_for_the_backward_beside_the_forward_of_one_kernel(tokens):
    found = [each for each in compare(tokens) if each.one[0] == "backward" and each.other[0] == "forward"]
    assert len(found) == 2
    assert all(max(each.distances) < 0.08 for each in found)


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_simulation_is_within_6_hundredths_of_june_for_one_kernels_head_dims(tokens):
    found = [each for each in compare(tokens) if each.one[1:] == (64, PEER) and each.other[1:] == (128, PEER)]
    assert len(found) == 2
    assert all(each.distances[0] < 0.06 for each in found)


def test_a_backward_counts_five_of_its_seven_products(monkeypatch):
    monkeypatch.setattr(published, "SIMULATED", {("dkdv", 64): {PEER: 1.0}, ("dq", 64): {PEER: 1.0}})
    assert simulated_speed("backward", 64, PEER) == pytest.approx(5 / 7)


def test_the_command_prints_a_row_for_each_cell_and_each_ratio(capsys):
    assert turing_sm.main(["--published"]) == 0
    factors, ratios = capsys.readouterr().out.split("\n\n")
    assert len(factors.splitlines()) == 2 + len(CELLS)
    assert len(ratios.strip().splitlines()) == 2 + len(TOKENS) * len(published.PAIRS)
