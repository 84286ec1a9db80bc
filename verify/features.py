"""The features of a case, in a verdict's words; and the features that all wrong answers share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .call import EIGHT_BITS, SHORT, Call
from .cases import Case
from .problems import Problem

DTYPES = tuple(SHORT.values())
DIMS = ("head_dim 64", "head_dim 128", "another head_dim", "head_dim above 256", "v of another head_dim")
HEADS = ("MHA", "GQA or MQA")
MASKS = ("no mask", "causal", "window")
LENGTHS = ("lengths in 64s", "other lengths", "seqlen_q other than seqlen_k", "rows without keys", "no keys at all")
CALLS = ("dense", "packed", "cache")
OPTIONS = (
    "softmax_scale", "softcap", "ALiBi", "dropout", "softcap with dropout", "pages", "pages of no multiple of 256",
    "rotary", "strided inputs", "large scores", "sizes far apart", "NaN or infinity", "8-bit cache",
)  # fmt: skip
LARGE = 4.0  # factor of q and k that makes scores near 100: exp overflows unless the row's maximum is subtracted
ENOUGH = 3  # with fewer answers, no rule and no verdict is stated
MOST_SHARED = 3  # a rule of more features would describe one problem, not a fault
# Features of problems with unusual numbers, whose errors may be tiny or huge.
UNUSUAL = frozenset(("large scores", "sizes far apart", "NaN or infinity"))
FEATURES = (*DTYPES, *DIMS, *HEADS, *MASKS, *LENGTHS, *CALLS, *OPTIONS)
# Features with which flash-attn itself refuses a call.
BEYOND = frozenset((
    "fp32", "fp64", "head_dim above 256", "v of another head_dim", "softcap with dropout",
    "pages of no multiple of 256", "8-bit cache",
))  # fmt: skip
PAGE = 256
# The parts of an answer, and the quantities of their checks.
PARTS: Mapping[str, Collection[str]] = {
    "output": ("out", "same seed, same mask", "kept", "S_dmask"),
    "softmax_lse": ("softmax_lse",),
    "gradients": ("dq", "dk", "dv"),
    "cache as left": ("k_cache", "v_cache"),
}


def features_of(case: Case) -> list[str]:
    """Return the features of a case, in the order of FEATURES."""
    wanted = {case.dtype, *(_of_problem(case.problem) if isinstance(case.problem, Problem) else _of_call(case.problem))}
    return [feature for feature in FEATURES if feature in wanted]


def _of_problem(p: Problem) -> set[str]:
    kinds = {"paged": "packed", "kvcache": "cache"}
    found = {kinds.get(p.kind, "packed" if "varlen" in p.kind else "dense")}
    found |= _of_shape(p.head_dim, p.value_dim, p.group, p.seqlens_q, p.seqlens_k)
    found |= _of_options(p.causal, p.window, p.softcap, p.softmax_scale)
    found |= set() if p.kind == "kvcache" else _of_rows(p.causal, p.window, p.seqlens_q, p.seqused or p.seqlens_k)
    there = {
        "ALiBi": p.alibi,
        "dropout": p.dropout_p,
        "softcap with dropout": p.softcap and p.dropout_p,
        "pages": p.page_size,
        "pages of no multiple of 256": p.page_size % PAGE,
        "8-bit cache": p.eight_bit,
        "rotary": p.rotary_dim,
        "strided inputs": set(p.layouts) != {"contiguous"},
        "large scores": p.magnitude >= LARGE,
        "sizes far apart": p.sizes,
        "NaN or infinity": p.stray or p.poison,
    }
    return found | {name for name, is_there in there.items() if is_there}


def _of_call(call: Call) -> set[str]:
    """Return the features of a recorded call, by its arguments."""
    args = call.args
    kind = "cache" if "k_cache" in args else "packed" if "varlen" in call.fn else "dense"
    q, k = call.q, args[next(name for name in ("qkv", "kv", "k_cache", "k") if name in args)]
    packed = next((name for name in ("qkv", "kv") if name in args), "")
    heads, keys = q.shape[-2], k.shape[-2]
    seqlens_q, seqlens_k = (
        [x.shape[1]] if start is None else start.diff().tolist()
        for x, start in ((q, args.get("cu_seqlens_q", args.get("cu_seqlens"))),
                         (k, args.get("cu_seqlens_k", args.get("cu_seqlens"))))
    )  # fmt: skip
    v = k if packed else args["v_cache" if "v_cache" in args else "v"]
    found = {kind} | _of_shape(q.shape[-1], v.shape[-1], heads // keys, seqlens_q, seqlens_k)
    window = args.get("window_size", (-1, -1))
    found |= _of_options(args.get("causal"), window, args.get("softcap"), args.get("softmax_scale"))
    found |= set() if kind == "cache" else _of_rows(args.get("causal"), window, seqlens_q, seqlens_k)
    there: dict[str, Any] = {
        "ALiBi": args.get("alibi_slopes") is not None,
        "dropout": call.dropout_p,
        "softcap with dropout": args.get("softcap") and call.dropout_p,
        "pages": args.get("block_table") is not None,
        "pages of no multiple of 256": args.get("block_table") is not None and k.shape[1] % PAGE,
        "rotary": args.get("rotary_cos") is not None,
        "8-bit cache": v.dtype in EIGHT_BITS.values(),
        "strided inputs": not all(args[name].is_contiguous() for name in ("q", "k", "v", "qkv", "kv") if name in args),
    }
    return found | {name for name, is_there in there.items() if is_there}


def _of_shape(
    head_dim: int, value_dim: int, group: int, seqlens_q: Sequence[int], seqlens_k: Sequence[int]
) -> set[str]:
    usual = f"head_dim {head_dim}" if head_dim in (64, 128) else "another head_dim"
    dim = usual if head_dim <= 256 else "head_dim above 256"
    lengths = "other lengths" if any(n % 64 for n in (*seqlens_q, *seqlens_k)) else "lengths in 64s"
    found = {dim if value_dim == head_dim else "v of another head_dim", HEADS[group > 1], lengths}
    return found | ({"seqlen_q other than seqlen_k"} if [*seqlens_q] != [*seqlens_k] else set())


def _of_options(causal: Any, window: Any, softcap: Any, scale: Any) -> set[str]:
    sides = [int(side) for side in window]
    has_window = max(sides) > 0 or sides[0] == 0 if causal else sides != [-1, -1]
    found = {name for name, is_there in (("causal", causal), ("window", has_window)) if is_there} or {"no mask"}
    return found | {name for name, is_there in (("softcap", softcap), ("softmax_scale", scale)) if is_there}


def _of_rows(causal: Any, window: Any, seqlens_q: Sequence[int], seqlens_k: Sequence[int]) -> set[str]:
    """Return which of two features there are: a mask that hides all keys of a row, and a sequence without keys."""
    right = 0 if causal else int(window[1])
    pairs = [(q, k) for q, k in zip(seqlens_q, seqlens_k) if q]
    masked = any(k and right >= 0 and k - q + right < 0 for q, k in pairs)
    there = {"rows without keys": masked, "no keys at all": not all(k for _, k in pairs)}
    return {name for name, is_there in there.items() if is_there}


def beyond_flash_attn(call: Call) -> list[str]:
    """Return the features of a call that flash-attn itself refuses."""
    found = {SHORT[call.dtype], *_of_call(call)}
    return [feature for feature in FEATURES if feature in found & BEYOND]


def shared_by(some: Sequence[Collection[str]], others: Sequence[Collection[str]]) -> list[str]:
    """Return the fewest features that every problem of ``some`` has, and that none of ``others`` has together. Empty if
    there are none, if more than MOST_SHARED are needed, or if ``some`` has fewer than ENOUGH problems.
    """
    if len(some) < ENOUGH:
        return []
    shared = [feature for feature in FEATURES if all(feature in each for each in some)]

    def explain(features: Collection[str]) -> bool:
        return bool(features) and not any(set(features) <= set(each) for each in others)

    if not explain(shared):
        return []
    # FEATURES begins with dtypes, so these are left out first: rare features say more.
    for feature in [*shared]:
        without = [each for each in shared if each != feature]
        if explain(without):
            shared = without
    return shared if len(shared) <= MOST_SHARED else []
