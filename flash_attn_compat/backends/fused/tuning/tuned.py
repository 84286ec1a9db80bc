"""Results of `flash-attn-compat tune` by GPU model: the times of each backend for usual calls, and the best tiles.

This user's results lie beside the compiled kernels; cards.jsonl holds results that others have sent. Nothing is timed
here. A malformed file counts as no result. Untuned cards without tensor cores get an estimate.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_attn_compat import settings
from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from flash_attn_compat.backends.fused.choosing.kinds import HEAD_DIMS
from flash_attn_compat.backends.fused.choosing.tiles import Tile
from flash_attn_compat.backends.fused.tuning import candidates
from flash_attn_compat.core.features import Feature, Traits, dtype_name, lacks_tensor_cores

_SHIPPED = Path(__file__).with_name("cards.jsonl")
# Cases that ``tune`` times, by feature. A call with several of these features counts as the first, which matters most.
_CASES = {
    "pages": Feature.PAGED,
    "decode": Feature.SEQUSED_K | Feature.APPEND,
    "ALiBi": Feature.ALIBI,
    "softcap": Feature.SOFTCAP,
    "window": Feature.WINDOW_LEFT,
    "causal": Feature.CAUSAL,
}
CASES = ("full", *reversed(_CASES))
_TIMES_FIELDS = "case", "head_dim", "dtype", "training", "milliseconds", "clock_mhz", "power_w"
_OVER_CACHE = Feature.SEQUSED_K | Feature.APPEND | Feature.PAGED


# Keys of times: (case, head_dim, dtype, whether with gradients). Keys of tiles: (kernel, head_dim, dtype).
_TimesKey = tuple[str, int, str, bool]
_TileKey = tuple[str, int, str]


class Card(NamedTuple):
    """Tuning results of one GPU model.

    times: for each usual problem, milliseconds by backend name, of every backend that serves it
    tiles: the tiles that kernels use instead of those of the table in tiles.py
    made_with: versions; state: clock and power during the timing; clocks: MHz and W by problem, medians, if known.
        These three are only for human readers
    """

    gpu: str
    made_with: str
    times: Mapping[_TimesKey, Mapping[str, float]] = {}
    tiles: Mapping[_TileKey, Tile] = {}
    state: str = ""
    clocks: Mapping[_TimesKey, tuple[float, float]] = {}

    def merge(self, newer: Card) -> Card:
        """Return a card with the results of both; those of ``newer`` replace this card's for the same case."""
        kept = {key: clock for key, clock in self.clocks.items() if key not in newer.times}
        return newer._replace(
            times={**self.times, **newer.times}, tiles={**self.tiles, **newer.tiles}, clocks={**kept, **newer.clocks}
        )


def to_row(card: Card) -> str:
    """Return a card as one line of cards.jsonl (JSON)."""
    times = [
        dict(zip(_TIMES_FIELDS, (*key, milliseconds, *card.clocks.get(key, (None, None)))))
        for key, milliseconds in card.times.items()
    ]
    tiles = [[*key, tile] for key, tile in card.tiles.items()]
    return json.dumps(
        {"gpu": card.gpu, "made_with": card.made_with, "times": times, "tiles": tiles, "state": card.state}
    )


def from_row(row: str) -> Card:
    """Return the card of one line of JSON. Raises ValueError for any other text."""
    try:
        fields: dict[str, Any] = json.loads(row)
        times = [_parse_times(**one) for one in fields["times"]]
        clocks = {key: (clock, power) for key, _, clock, power in times if clock is not None and power is not None}
        tiles = dict(_parse_tile(*one) for one in fields["tiles"])
        names = _check_text(fields["gpu"]), _check_text(fields["made_with"])
        state = _check_text(fields.get("state", ""))
        return Card(*names, {key: figures for key, figures, *_ in times}, tiles, state, clocks)
    # The JSON has another structure, is nested too deeply for the parser, or has numbers beyond float's range.
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"no card: {type(error).__name__}: {error}") from error


def _parse_times(
    case: str,
    head_dim: int,
    dtype: str,
    training: bool,
    milliseconds: dict[str, float],
    clock_mhz: float | None = None,
    power_w: float | None = None,
) -> tuple[_TimesKey, dict[str, float], float | None, float | None]:
    figures = {_check_text(name): float(_check(ms, int, float)) for name, ms in milliseconds.items()}
    if "fused" not in figures or not all(0 < ms < math.inf for ms in figures.values()):
        raise ValueError(f"no times: {milliseconds!r:.200}")
    clock, power = (None if value is None else float(_check(value, int, float)) for value in (clock_mhz, power_w))
    key = _check_text(case), _check_int(head_dim), _check_text(dtype), _check(training, bool)
    return key, figures, clock, power


def _parse_tile(entry: str, head_dim: int, dtype: str, tile: list[int]) -> tuple[_TileKey, Tile]:
    parts: list[Any] = [part if isinstance(part, bool) else _check_int(part) for part in tile]
    return (_check_text(entry), _check_int(head_dim), _check_text(dtype)), Tile(*parts)


def _check(value: Any, *types: type) -> Any:
    """Return ``value`` if its type is one of ``types``, else raise TypeError; a bool does not count as an int."""
    if type(value) not in types:
        raise TypeError(f"no {types[0].__name__}: {value!r:.200}")
    return value


def _check_text(value: Any) -> str:
    """Return ``value`` if it is text without control characters, which could affect terminals; else raise TypeError."""
    text: str = _check(value, str)
    if not text.isprintable():
        raise TypeError(f"not printable: {text!r:.200}")
    return text


def _check_int(value: Any) -> int:
    number: int = _check(value, int)
    if not 0 <= number < 2**31:
        raise TypeError(f"no whole number of this size: {value!r:.200}")
    return number


_cards: dict[str, Card | None] = {}


def find_card(gpu: str | None) -> Card | None:
    """Return the tuning results for a GPU model, or None. Each process reads the files only once."""
    if gpu is None:
        return None
    if gpu not in _cards:
        shipped, stored = _read_shipped().get(gpu), _read_stored(gpu)
        _cards[gpu] = shipped.merge(stored) if shipped and stored else stored or shipped
    return _cards[gpu]


def store_card(card: Card) -> bool:
    """Merge the card into this user's file. Return False if that cannot be written; then only this process uses it."""
    stored = _read_stored(card.gpu)
    card = stored.merge(card) if stored else card
    written = kernel_files.write(_file_name(card.gpu), to_row(card).encode())
    _cards.pop(card.gpu, None)
    if not written:
        _cards[card.gpu] = card
    return written


@contextlib.contextmanager
def override_card(card: Card) -> Iterator[None]:
    """Use ``card`` as the only tuning results of its GPU model within the context, in this process."""
    before = dict(_cards)
    _cards[card.gpu] = card
    try:
        yield
    finally:
        _cards.clear()
        _cards.update(before)


def find_times(traits: Traits) -> Mapping[str, float] | None:
    """Return milliseconds by backend name for calls with these traits, or None.

    Always None if the settings force our kernels, so that no other backend can go first.
    """
    card = find_card(traits.gpu)
    is_forced = settings.is_on(settings.FUSED)
    if card is None or is_forced or traits.features & Feature.WINDOW_RIGHT:  # ``tune`` does not time right windows
        return None
    case = next((case for case, feature in _CASES.items() if traits.features & feature), "full")
    largest = max(traits.head_dim, traits.head_dim_v)
    size = next((size for size in HEAD_DIMS if largest <= size), None)
    if size is None:
        return None
    return card.times.get((case, size, dtype_name(traits.dtype), traits.needs_backward))


def estimate_times(traits: Traits) -> Mapping[str, float] | None:
    """Return estimated relative times by backend name for calls on a GPU without tensor cores; None for other calls.

    There, ``chunked`` is faster: it multiplies in fp32, while PyTorch's half-precision kernels and ours need tensor
    cores. Calls over a cache get no estimate, since only ``fused`` reads the cache in place.
    """
    is_forced = settings.is_on(settings.FUSED)
    if not lacks_tensor_cores(traits.gpu) or is_forced or traits.features & _OVER_CACHE:
        return None
    warn_if_slow(traits.gpu)
    return {"chunked": 1.0, "fused": 4.0, "torch_efficient": 4.0, "sdpa": 4.0}


def warn_if_slow(gpu: str | None) -> None:
    """Warn once if the GPU has no tensor cores and no tuning result, so that the order of backends is an estimate."""
    if gpu is not None and lacks_tensor_cores(gpu) and find_card(gpu) is None:
        _warn(gpu)


@functools.cache
def _warn(gpu: str) -> None:
    warnings.warn(
        f"{gpu} has no tensor cores, which half precision needs to be fast: use float32 there if you can. Calls in "
        "half precision go to the backend chunked, which multiplies in fp32, until `flash-attn-compat tune` has timed "
        "all backends on this GPU",
        RuntimeWarning,
        stacklevel=2,
    )


def find_tiles(gpu: str | None, number: int, D: int, dtype: torch.dtype) -> tuple[tuple[str, Tile], ...]:
    """Return (kernel, tile) pairs that replace the table's tiles. Only tiles of candidates.py count: these fit."""
    card = find_card(gpu)
    if card is None:
        return ()
    wanted = D, dtype_name(dtype)
    return tuple(
        (entry, tile) for (entry, *shape), tile in card.tiles.items()
        if tuple(shape) == wanted and tile in candidates.candidate_tiles(entry, number, D)
    )  # fmt: skip


def summarize(gpu: str) -> list[str]:
    """Return a line for each tuning result of a GPU model, or a line that says that there is none."""
    card = find_card(gpu)
    if card is None:
        return ["not tuned: the order of backends is that of an H200 (flash-attn-compat tune times them here)"]
    return ["; ".join(filter(None, (f"tuned with {card.made_with}", card.state))), *format_lines(card)]


def format_lines(card: Card) -> list[str]:
    """Return the card's times and tiles as lines in two columns."""
    rows = [_format_times(key, times, card.clocks.get(key)) for key, times in card.times.items()]
    rows += [_format_tile(key, tile) for key, tile in card.tiles.items()]
    width = max((len(case) for case, _ in rows), default=0)
    return [f"{case:{width}}  {result}" for case, result in rows]


def _format_times(key: _TimesKey, times: Mapping[str, float], clock: tuple[float, float] | None) -> tuple[str, str]:
    case, head_dim, dtype, training = key
    listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in sorted(times.items(), key=lambda one: one[1]))
    state = "" if clock is None else f" at {clock[0]:,.0f} MHz, {clock[1]:.0f} W"
    return f"{case}, head_dim {head_dim}, {dtype}{', training' * training}", f"{listed}{state}"


def _format_tile(key: _TileKey, tile: Tile) -> tuple[str, str]:
    entry, head_dim, dtype = key
    rows, keys = (tile.streamed_rows, tile.rows) if entry == "dkdv" else (tile.rows, tile.streamed_rows)
    return f"{entry} of head_dim {head_dim}, {dtype}", f"{rows} rows, {keys} keys, {tile.warps} warps"


def _read_stored(gpu: str) -> Card | None:
    return _parse_rows([(kernel_files.read(_file_name(gpu)) or b"").decode(errors="replace")]).get(gpu)


@functools.cache
def _read_shipped() -> dict[str, Card]:
    return _parse_rows(_SHIPPED.read_text(encoding="utf-8").splitlines())


def _parse_rows(rows: Iterable[str]) -> dict[str, Card]:
    cards = {}
    for row in rows:
        try:
            card = from_row(row)
        except ValueError:  # such as a row of another version
            continue
        cards[card.gpu] = card
    return cards


def _file_name(gpu: str) -> str:
    """Return the file name for a GPU model. It changes with our kernels and PyTorch, since old times are then wrong."""
    sources = *sorted(path.name for path in nvrtc.SOURCES.glob("*.cu")), *nvrtc.HEADERS
    return kernel_files.make_name("tuned", gpu, torch.__version__, *map(nvrtc.read_source, sources))
