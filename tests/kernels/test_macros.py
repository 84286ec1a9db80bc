"""The kernels' macros: docs/kernels.md lists each, and the sources that are compiled with it read it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from flash_attn_compat.backends.fused import flex
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.variants import FP16, Kind, Variant
from tests import fused_coverage

PAGE = Path(__file__).parents[2] / "docs/kernels.md"
_ROW = re.compile(r"^\| `([A-Z0-9_]+)` \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
SOURCES = sorted(nvrtc.SOURCES.rglob("*.cu*"))


def all_variants() -> list[Variant]:
    """Of Turing and of a newer GPU; each macro at each of its values."""
    found: list[Variant] = []
    for number in (75, 90):
        kinds = [*fused_coverage.kinds(number), *fused_coverage.masked_kinds(number)]
        kinds += fused_coverage.eight_bit_kinds(number)
        kinds.append(Kind(number, FP16, 192, head_dim_v=128))
        found += variants.made_for(kinds)
    packed = Kind(75, FP16, 64)
    makers = variants.forward, variants.delta, variants.dkdv, variants.dq
    mods, blocks = flex.Mods("", True, True), flex.Blocks(128, 128, flex.BlockLists(torch.empty(0), torch.empty(0)))
    found += [flex.make_variant(make.__name__, packed, mods, of) for make in makers for of in (None, blocks)]
    return [*found, *(variants.with_shared_grid(make(packed)) for make in makers)]


def table() -> dict[str, tuple[str, set[str]]]:
    """Each macro's values and kernels, as the page has them."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Macros\n")[2].partition("\n## ")[0]
    return {macro: (values, set(kernels.split(", "))) for macro, values, kernels in _ROW.findall(text)}


def includes(source: str) -> str:
    """A source with all headers that it includes, one after the other."""
    text = (nvrtc.SOURCES / source).read_text(encoding="utf-8")
    headers = re.findall(r'^#include "([\w/]+\.cuh)"', text, re.MULTILINE)
    return text + "".join(includes(header) for header in headers if header != nvrtc.GENERATED)


def test_the_page_lists_every_macro_with_the_kernels_whose_variants_set_it() -> None:
    kernels: dict[str, set[str]] = defaultdict(set)
    for variant in all_variants():
        for macro, _ in variant.macros:
            kernels[macro].add(variant.entry)
    assert {macro: entries for macro, (_, entries) in table().items()} == kernels
    assert kernels.keys() >= variants.DEFAULTS.keys()


def test_the_page_lists_every_value_that_a_macro_takes() -> None:
    taken: dict[str, set[int]] = defaultdict(set)
    for variant in all_variants():
        for macro, value in variant.macros:
            taken[macro].add(value)
    for macro, (values, _) in table().items():
        numbers = [int(number) for number in re.findall(r"\d+", values)]
        listed = set(range(numbers[0], numbers[-1] + 1)) if " to " in values else set(numbers)
        assert taken[macro] <= listed, macro


@pytest.mark.parametrize("entry", sorted(variants.MAKERS))
def test_the_sources_of_a_kernel_read_each_macro_of_its_variants(entry: str) -> None:
    name = "decode" if entry == "decode_append" else entry
    made = [variant for variant in all_variants() if variant.entry == name]
    text = re.sub(r"//.*", "", includes(made[0].source))
    for macro in {macro for variant in made for macro, _ in variant.macros}:
        assert re.search(rf"\b{macro}\b", text), macro


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_line_of_a_kernel_source_is_longer_than_120_columns(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []
