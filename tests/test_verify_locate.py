"""verify locate: planted mistakes are named, right kernels left in peace, wrong questions end in one line."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from tests import mutants
from verify.cli import main
from verify.difference import first_place, gap, texture, which
from verify.inputs import draw, recipe
from verify.locate import Located, heat_map, locate
from verify.planted import planted, right
from verify.probe import Setting

SMALL = ["--n", "96", "--br", "32", "--bc", "32", "--batch", "1", "--heads", "2", "--head-dim", "16"]
REFERENCE = ("reference", mutants.correct.flash_attn_func)


def located(function, n=96, causal=False, keys=None, dtype=torch.float32, tile=32, heads=2, heads_k=None) -> Located:
    of_keys = (1, keys or n, heads_k or heads, 16)
    tensors = draw({"q": (1, n, heads, 16), "k": of_keys, "v": of_keys}, dtype, 0)
    setting = Setting(**tensors, causal=causal, block_rows=tile, block_columns=tile, device="cpu")
    return locate([("mine", function), REFERENCE], setting)


def named(found: Located) -> str:
    """The last of the findings about A: what the mistake is called."""
    return found.findings["A"][-1]


# ---- the classical bug ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "said", "row"),
    [
        ("maximum_at_next_tile", ["key tile 0 is right, every later one is wrong",
                                  "the running maximum m of the key tiles before is not what it was: stored at"], 0),
        ("maximum_without_tile_offset", ["query tile 0 is right, every later one is wrong",
                                         "the running maximum m of the key tiles before is not what it was"], 32),
    ],
)  # fmt: skip
def test_a_running_maximum_stored_at_the_wrong_index_is_named(planted, said, row, tmp_path, capsys):
    saved = tmp_path / "a.json"
    arguments = [f"verify.planted:{planted}", "tests.mutants:correct.flash_attn_func", *SMALL, "--json", str(saved)]
    assert main(["locate", *arguments]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert all(part in shown for part in said)
    # The heat map, two rows in each character.
    assert "·" * (row // 2) + "█" * 16 in shown
    data = json.loads(saved.read_text())
    place = {"batch": 0, "head": 0, "row": row, "channel": 0, "query_tile": row // 32, "key_tile": 1}
    assert data["first"] | {"channel": 0} == place
    assert data["growth"] == {"A": [False, True, True]}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("mistake", "part"),
    [
        ("maximum at next tile", "the running maximum m"),
        ("maximum without tile offset", "the running maximum m"),
        ("row sum not rescaled", "the row sum l is not brought to the new maximum"),
        ("output not rescaled", "the output O is not brought to the new maximum"),
    ],
)
def test_state_carried_wrongly_between_key_tiles_is_named_from_outside(mistake, part, causal):
    kernel = partial(planted(mistake), block_rows=24, block_columns=40)
    assert part in named(located(kernel, n=100, causal=causal, tile=40))


# ---- other mistakes -------------------------------------------------------------------------------------------------


def of(change_keys=lambda x: x, change_out=lambda out: out):
    """The right kernel, but of other keys, or with something done to its output."""

    def attention(q, k, v, causal=False):
        return change_out(mutants.correct.flash_attn_func(q, change_keys(k), change_keys(v), causal=causal))

    return attention


RANDOM = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("kernel", "settings", "part"),
    [
        (mutants.stale_key_tile.flash_attn_func, {"n": 128}, "key tile 3: not what it should be"),
        (mutants.tiled_heads.flash_attn_func, {"heads": 4, "heads_k": 2}, "the scores themselves"),
        (mutants.top_left_causal.flash_attn_func, {"causal": True, "keys": 130}, "the causal mask"),
        (mutants.right_edge_one_too_far.flash_attn_func, {"causal": True}, "the causal mask"),
        (mutants.stored_maximum_lost.flash_attn_func, {}, "the running maximum m"),
        (of(lambda x: x[:, : x.shape[1] // 32 * 32 or None]), {"n": 100}, "the last key tile"),
        (of(lambda x: torch.cat((x[:, :32], x[:, 64:]), 1)), {"n": 128}, "key tile 1: never counted"),
        (of(change_out=lambda out: out[..., [1, 0, *range(2, 16)]]), {}, "the softmax is right"),
        (of(change_out=torch.zeros_like), {}, "rows that are zero"),
        (of(change_out=lambda out: out * torch.nan), {}, "NaN or infinity"),
        (of(change_out=lambda out: torch.randn(out.shape, generator=RANDOM)), {}, "two calls differ"),
    ],
)
def test_a_mistake_is_called_what_it_is(kernel, settings, part):
    assert part in named(located(kernel, **settings))


def test_a_changed_input_is_remarked_even_where_the_answer_is_right():
    def in_place(q, k, v, causal=False):
        out = mutants.correct.flash_attn_func(q, k, v, causal=causal)
        q.zero_()
        return out

    found = located(in_place)
    assert found.first is None
    assert found.kernels["A"].remarks == ["it changed its input q"]


def test_a_kernel_of_one_length_only_is_still_located():
    def of_96(q, k, v, causal=False):
        if q.shape[1] != 96:
            raise ValueError("96 or nothing")
        return planted("row sum not rescaled")(q, k, v, causal)

    found = located(of_96)
    assert found.first is not None and found.key_tile is None
    assert "grown key tile by key tile: it does not take smaller problems" in found.findings["A"]


# ---- no false alarm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "keys", "causal"), [(96, None, False), (101, None, True), (37, 90, True), (90, 37, True)]
)
def test_two_right_kernels_are_the_same(dtype, n, keys, causal):
    found = located(partial(right, block_rows=24, block_columns=32), n=n, keys=keys, causal=causal, dtype=dtype)
    assert found.first is None and all(each.check.ok for each in found.kernels.values())


def test_two_backends_are_compared_by_import_path(capsys):
    assert main(["locate", "chunked", "reference", *SMALL]) == 0
    assert "SAME" in capsys.readouterr().out


# ---- the parts ------------------------------------------------------------------------------------------------------


def test_the_first_difference_is_the_first_in_batch_head_row_channel_order():
    differs = torch.zeros(2, 3, 40, 8, dtype=torch.bool)
    differs[1, 0, 0, 0] = differs[0, 2, 17, 5] = differs[0, 2, 18, 0] = True
    place = first_place(differs, block_rows=16)
    assert place is not None
    assert (place.batch, place.head, place.row, place.channel, place.query_tile) == (0, 2, 17, 5, 1)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ((slice(None), slice(16, 32), slice(None)), "whole tiles"),
        ((slice(None), slice(18, 20), slice(None)), "whole rows"),
        ((slice(None), slice(16, 32), slice(2, 4)), "whole channels of tiles"),
        ((0, 5, 3), "scattered elements"),
    ],
)
def test_the_texture_is_the_largest_thing_that_differs_as_a_whole(where, expected):
    differs = torch.zeros(1, 2, 40, 8, dtype=torch.bool)
    differs[(0, *where)] = True
    assert texture(differs, block_rows=16) == expected


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([False, True, True], "tile 0 is right, every later one is wrong"),
        ([False, False, True], "tiles 0 to 1 are right, every later one is wrong"),
        ([True, False, True, False], "of 4 tiles only 0, 2 are wrong"),
        ([True, True], "all 2 tiles are wrong"),
        ([True], "the only tile is wrong"),
        ([False, False], "no tile is wrong"),
    ],
)
def test_a_pattern_is_put_into_words(wrong, words):
    assert which(wrong, "tile") == words


def test_the_heat_map_holds_the_largest_error_of_each_head_and_row_bin():
    a = torch.zeros(2, 130, 3, 4)
    b = a.clone()
    b[1, 129, 2, 3] = 5.0
    b[0, 0, 0, 0] = torch.nan
    table = heat_map(gap(a, b), tolerance=1.0)
    clean = "·" * 43
    assert table.rows == [("0", "█" + clean), ("1", clean + "·"), ("2", clean + "░")]
    assert "3 rows in each character" in table.columns[1]


@pytest.mark.parametrize(("error", "shade"), [(0.0, "·"), (1.0, "·"), (50.0, "▒"), (500.0, "▓"), (1e4, "█")])
def test_each_shade_of_the_heat_map_is_ten_times_worse(error, shade):
    assert heat_map(torch.full((1, 1, 1, 1), error), 1.0).rows == [("0", shade)]


def test_the_printed_recipe_gives_the_inputs(capsys):
    shape = (1, 5, 2, 16)
    drawn = draw({"q": shape, "k": shape, "v": shape}, torch.float16, 7)
    generator = torch.Generator("cpu").manual_seed(7)
    for tensor in drawn.values():
        assert torch.equal(tensor, torch.randn(1, 5, 2, 16, generator=generator).to(torch.float16))
    assert 'torch.Generator("cpu").manual_seed(7)' in recipe(torch.float16, 7)
    main(["locate", "verify.planted:right", *SMALL, "--seed", "7"])
    assert "manual_seed(7)" in capsys.readouterr().out


# ---- wrong questions ------------------------------------------------------------------------------------------------


def raises(q, k, v, causal=False):
    raise ZeroDivisionError("planted\nsecond line")


def of_another_shape(q, k, v, causal=False):
    return q.transpose(1, 2)


def knows_no_mask(q, k, v):
    return q
