"""verify locate: planted mistakes are named, right kernels left in peace, wrong questions end in one line."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from tests.forms.plain import in_turns
from tests.verify import mutants
from verify.cli import main
from verify.diagnosis import Setting, which
from verify.locate import Located, heat_map, locate, report
from verify.planted import bfloat16_throughout, half_inputs, half_output, half_weights, planted, right
from verify.problems import Problem

SMALL = ["--n", "96", "--br", "32", "--bc", "32", "--batch", "1", "--heads", "2", "--head-dim", "16"]
REFERENCE = ("reference", mutants.correct.flash_attn_func)


def located(
    function, n=96, causal=False, keys=None, dtype="float32", tile=32, heads_k=2, group=1, atol=None
) -> Located:
    shape = {"nheads_k": heads_k, "group": group, "head_dim": 16, "dtype": dtype, "backward": False}
    call = Problem(seqlens_q=(n,), seqlens_k=(keys or n,), causal=causal, **shape).build()
    return locate([("mine", function), REFERENCE], Setting(call, tile, tile, "cpu"), atol)


def named(found: Located) -> str:
    """Return the name of the mistake, the last finding about A."""
    return found.wrong["A"].sentences[-1]


# ---- the classical bug ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "said", "row"),
    [
        ("maximum_at_next_tile", ["key tile 0 is right, every later one is wrong",
                                  "the running maximum m of the key tiles before is lost: stored at"], 0),
        ("maximum_without_tile_offset", ["query tile 0 is right, every later one is wrong",
                                         "the running maximum m of the key tiles before is lost"], 32),
    ],
)  # fmt: skip
def test_a_running_maximum_stored_at_the_wrong_index_is_named(planted, said, row, tmp_path, capsys):
    saved = tmp_path / "a.json"
    arguments = [
        f"verify.planted:{planted}",
        "tests.verify.mutants:correct.flash_attn_func",
        *SMALL,
        "--json",
        str(saved),
    ]
    assert main(["locate", *arguments]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert all(part in shown for part in said)
    # The heat map, two rows in each character.
    assert "·" * (row // 2) + "█" * 16 in shown
    data = json.loads(saved.read_text())
    place = {"batch": 0, "head": 0, "row": row, "channel": 0, "query_tile": row // 32, "key_tile": 1}
    assert data["first"] | {"channel": 0} == place
    assert data["growth"] == {"A": [False, True, True]}


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
        (mutants.stale_key_tile.flash_attn_func, {"n": 128}, "another tile's K or V, or stale memory"),
        (mutants.stored_maximum_lost.flash_attn_func, {}, "the running maximum m"),
        (of(change_out=torch.zeros_like), {}, "rows that are zero"),
        (of(change_out=lambda out: out * torch.nan), {}, "NaN or infinity"),
        (of(change_out=lambda out: torch.randn(out.shape, generator=RANDOM)), {}, "two calls differ"),
    ],
)
def test_a_mistake_that_test_verify_faults_lacks_is_named(kernel, settings, part):
    assert part in named(located(kernel, **settings))


def test_a_changed_input_is_remarked_even_where_the_answer_is_right():
    def in_place(q, k, v, causal=False):
        out = mutants.correct.flash_attn_func(q, k, v, causal=causal)
        q.zero_()
        return out

    found = located(in_place)
    assert found.first is None
    assert found.kernels["A"].remarks == ["it changed its input q"]


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (planted("row sum not rescaled"), "grown key tile by key tile: the kernel declines smaller problems"),
        (half_inputs, "rounded to fp16 somewhere"),
    ],
)
def test_a_kernel_of_one_length_only_is_still_located(kernel, said):
    def of_96(q, k, v, causal=False):
        if q.shape[1] != 96:
            raise ValueError("96 or nothing")
        return kernel(q, k, v, causal=causal)

    found = located(of_96)
    assert found.first is not None and found.key_tile is None
    assert said in " ".join(found.wrong["A"].sentences)


# ---- right, but in lower precision -----------------------------------------------------------------------------------


ROUNDING = {
    half_inputs: "rounded to fp16 somewhere (its inputs, and nothing else",
    half_output: "rounded to fp16 somewhere (its output holds no other numbers",
    half_weights: "rounded to fp16 somewhere (TF32 has as many digits)",
    bfloat16_throughout: "rounded to bf16 somewhere (its output holds no other numbers)",
}


@pytest.mark.parametrize(("kernel", "causal"), in_turns(ROUNDING, (False, True)))
def test_a_right_kernel_of_lower_precision_is_told_that_it_rounds_and_nothing_else(kernel, causal):
    said = ROUNDING[kernel]
    found = located(kernel, causal=causal)
    assert said in named(found) and "no other mistake" in named(found)
    headings = [line for line in report(found, {}).conclusion if line.startswith("A (mine) is ")]
    assert headings == [f"A (mine) is right in {'bf16' if 'bf16' in said else 'fp16'} only:"]


def test_fp16_is_called_less_than_fp32_where_fp64_was_asked_for():
    single = of(change_out=lambda out: out.float().double())
    assert "rounded to fp32 somewhere" in named(located(single, dtype="float64"))


def test_sums_kept_in_fp16_look_like_bf16():
    """Over many keys these lose digits that fp16 has."""
    shape = {"nheads_k": 1, "head_dim": 16, "dtype": "float16", "value_mean": 1.0, "backward": False}
    call = Problem(seqlens_q=(4,), seqlens_k=(8192,), **shape).build()
    kernels = [("mine", mutants.fp16_accumulation.flash_attn_func), REFERENCE]
    assert "sums kept in fp16" in named(locate(kernels, Setting(call, 4, 2048, "cpu"), atol=1e-3))


def mixed_in(share, axis):
    """Another head's, batch element's or channel's output is added, no larger than a rounding to fp16."""
    return of(change_out=lambda out: out + share * out.roll(1, axis))


@pytest.mark.parametrize(
    "kernel",
    [
        mixed_in(1e-4, 2),
        mixed_in(1e-4, 3),
        of(change_out=lambda out: spoil_row(out, 1e-4)),
        of(change_out=lambda out: 1.01 * out),
        of(change_out=lambda out: 1.0005 * out),
        lambda q, k, v, causal=False: right(1.01 * q, k, v, causal=causal),
    ],
    ids=["heads", "channels", "one row", "1 per cent", "0.05 per cent", "scale"],
)
@pytest.mark.parametrize("n", [96, pytest.param(320, marks=pytest.mark.thorough)])
def test_a_mistake_as_small_as_a_rounding_is_not_taken_for_one(kernel, n):
    found = located(kernel, n=n)
    assert found.first is None or "rounded" not in named(found)


def spoil_row(out, by):
    out = out.clone()
    out[:, 5] *= 1 + by
    return out


def test_a_key_left_out_of_many_is_not_taken_for_a_rounding():
    """It is worth less than bf16 rounds away there, but not in a smaller problem."""
    found = located(of(change_keys=lambda x: x[:, :-1]), n=512, tile=128, heads_k=1)
    assert "rounded" not in named(found)


# ---- no false alarm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "keys", "causal", "dtype"),
    [
        (96, None, False, "bfloat16"),
        (101, None, True, "float32"),
        (37, 90, True, "float16"),
        (90, 37, True, "bfloat16"),
        (90, 37, True, "float32"),
    ],
)
def test_two_right_kernels_are_the_same(dtype, n, keys, causal):
    found = located(partial(right, block_rows=24, block_columns=32), n=n, keys=keys, causal=causal, dtype=dtype)
    assert found.first is None and all(each.check.ok for each in found.kernels.values())


WRONG_GRADIENT, NO_MAXIMUM = (f"tests.verify.seven_kernels:{name}" for name in ("wrong_gradient", "no_maximum"))
OPTIONS = ["--window", "20", "-1", "--softcap", "4", "--softmax-scale", "0.3", "--alibi"]
# A question, its exit code, and words of the answer.
COMMANDS = {
    "a compiled function, which tells no parameters": (
        ["torch.nn.functional:scaled_dot_product_attention"], 1,
        ["A (torch.nn.functional:scaled_dot_product_attention) is wrong"],
    ),
    "two backends": (["chunked", "reference"], 0, ["SAME"]),
    "outputs alone of a wrong gradient": (
        [WRONG_GRADIENT], 0,
        ["SAME: no element of out differs", "(compared: out alone; --backward compares dq, dk and dv too)"],
    ),
    **{
        f"a gradient that is a little too large, within the slack of two right ones, {dtype}": (
            [WRONG_GRADIENT, "--dtype", dtype, "--backward"], 1, ["=> dk: all of it is 1.05 times the right value"],
        )
        for dtype in ("fp16", "fp32")
    },
    "gradients of a wrong output": (
        ["verify.planted:row_sum_not_rescaled", "--backward"], 1, ["dq, dk and dv were not compared"],
    ),
    "gradients of a kernel without a backward": (
        ["tests.verify.test_verdicts:detached", "--backward"], 2,
        ["tests.verify.test_verdicts:detached gives no gradients"],
    ),
    "no maximum subtracted from usual scores": ([NO_MAXIMUM], 0, ["SAME"]),
    "no maximum subtracted from large scores": (
        [NO_MAXIMUM, "--magnitude", "12"], 1,
        ["=> NaN or infinity: no maximum subtracted before exp", "q and k times 12 before .to"],
    ),
    "options of a kernel that takes them": (["tests.verify.mutants:correct", *OPTIONS, "--backward"], 0, ["SAME"]),
    "an option in which a kernel is wrong": (
        ["tests.verify.mutants:left_edge_one_too_far", *OPTIONS[:3]], 1, ["left side shows one key too many"],
    ),
    "options of a kernel that does not take them": (
        ["tests.verify.seven_kernels:right", *OPTIONS], 2, ["unexpected keyword argument"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", COMMANDS)
def test_the_command_answers_and_has_the_exit_code_of_its_answer(asked, capsys):
    arguments, code, said = COMMANDS[asked]
    assert main(["locate", *arguments, *SMALL]) == code
    shown = " ".join("".join(capsys.readouterr()).split())
    assert [part for part in said if part not in shown] == [], shown


# ---- what is shown --------------------------------------------------------------------------------------------------


def spoiled(*index, by=1.0):
    """The right kernel with something added to a part of its output, (batch, seqlen, heads, head_dim)."""

    def change(out):
        out = out.clone()
        out[index] += by
        return out

    return of(change_out=change)


@pytest.mark.parametrize(
    ("where", "first", "texture"),
    [
        ((slice(None), slice(32, 64)), (0, 0, 32, 0, 1), "whole tiles"),
        ((slice(None), slice(34, 36), 1), (0, 1, 34, 0, 1), "whole rows"),
        ((slice(None), slice(32, 64), slice(None), slice(2, 4)), (0, 0, 32, 2, 1), "whole channels of tiles"),
        (([0, 0], [70, 17], [0, 1], [5, 3]), (0, 0, 70, 5, 2), "scattered elements"),
    ],
)
def test_the_first_difference_and_the_largest_wrong_unit_are_named(where, first, texture):
    found = located(spoiled(*where))
    assert found.first == first
    (line,) = [line for line in report(found, {}).conclusion if line.startswith("DIFFERENT")]
    assert line.endswith(f"in {texture}")


def test_each_shade_of_the_heat_map_is_ten_times_worse_and_shows_the_worst_of_its_rows():
    errors = torch.zeros(96, 1)
    errors[[0, 3, 4, 7, 8, 10], 0] = torch.tensor([0.5, 5.0, 50.0, 500.0, 5e4, torch.nan])
    found = located(spoiled(0, slice(None), 1, by=errors), atol=1.0)
    table = heat_map(found.error, found.tolerance, found.differs)
    assert table.rows == [("0", "·" * 48), ("1", "·░▒▓██" + "·" * 42)]
    assert "2 rows in each character" in table.columns[1]


def test_a_report_is_about_the_kernel_that_is_wrong():
    spoilt, correct = located(of(change_out=torch.zeros_like)), located(right)
    kernels = [REFERENCE, ("theirs", of(change_out=torch.zeros_like))]
    assert report(locate(kernels, spoilt.setting), {}).subject == "theirs"
    assert report(correct, {}).subject == "mine"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([False, False, True], "tiles 0 to 1 are right, every later one is wrong"),
        ([True, False, True, False], "of 4 tiles only 0, 2 are wrong"),
        ([True, True], "every tile is wrong"),
        ([False, False], "no tile is wrong"),
    ],
)
def test_a_pattern_is_put_into_words(wrong, words):
    assert which(wrong, "tile") == words


ASKED = []


def records(q, k, v, causal=False):
    ASKED.append((q, k, v))
    return mutants.correct.flash_attn_func(q, k, v, causal=causal)


def test_the_printed_recipe_gives_the_inputs(capsys):
    ASKED.clear()
    main(["locate", "tests.verify.test_locate:records", *SMALL, "--seed", "7", "--dtype", "fp16"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "q, k, v in this order: torch.randn(batch, seqlen, heads, head_dim, generator=g).to(torch.float16)" in shown
    assert 'g = torch.Generator("cpu").manual_seed(7)' in shown
    generator = torch.Generator("cpu").manual_seed(7)
    for tensor in ASKED[-1]:  # the first call asks whether it is an attention function
        assert torch.equal(tensor, torch.randn(1, 96, 2, 16, generator=generator).to(torch.float16))


# ---- wrong questions ------------------------------------------------------------------------------------------------


def raises(q, k, v, causal=False):
    raise ZeroDivisionError("planted\nsecond line")


def of_another_shape(q, k, v, causal=False):
    return q.transpose(1, 2)


def knows_no_mask(q, k, v):
    return q
