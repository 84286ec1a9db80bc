"""The report as one HTML page: no script, nothing from the network, readable on a phone, in the dark and on paper.

Turns the values of report_facts.py into markup; computes nothing.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verify.report_facts import (
    LABELS,
    Answers,
    Entry,
    Pair,
    Score,
    Speed,
    Workload,
    forced_capability,
    machine,
    typical,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9d9e0; --card: #f7f8fa; --page: #fff;
  --good: #18794e; --bad: #ce2c31; --ours: #0b68cb; --rival: #8b8d98; --track: #e6e8eb }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaec; --soft: #a3a8b0; --line: #3a3d42; --card: #1f2226;
  --page: #151719; --good: #4cc38a; --bad: #ff8589; --ours: #52a9ff; --rival: #80838d; --track: #2d3035 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem 1rem 3rem; max-width: 64rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 .25rem }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-top: .6rem; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
p { margin: .4rem 0 .8rem; max-width: 42rem }
code { font-size: .86em; background: var(--card); padding: .1em .3em; border-radius: .2em }
pre { background: var(--card); padding: .7rem; border-radius: .4rem; white-space: pre-wrap; font-size: .85rem }
.soft { color: var(--soft); font-size: .88rem }
.verdict { border-radius: .6rem; padding: .8rem 1rem; margin: 1rem 0; font-size: 1.15rem; font-weight: 650;
  border: 2px solid }
.good { color: var(--good) } .bad { color: var(--bad); font-weight: 650 }
.plain { background: var(--card); border-radius: .6rem; padding: .8rem 1rem; max-width: none }
.grid { display: grid; gap: .2rem 1.6rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) }
.three { grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)) }
.bars { margin: .5rem 0 1rem }
.bar { display: grid; grid-template-columns: minmax(8rem, 13rem) 1fr 4.6rem; gap: 0 .6rem; align-items: center;
  padding: .16rem 0; font-size: .88rem; line-height: 1.25 }
.bar .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.track { position: relative; height: .8rem; background: var(--track); border-radius: .2rem }
.fill { position: absolute; top: 0; bottom: 0; border-radius: .2rem; background: var(--rival); min-width: 2px }
.ours .fill { background: var(--ours) } .bad .fill { background: var(--bad) } .good .fill { background: var(--good) }
.mark { position: absolute; top: -.1rem; bottom: -.1rem; width: 2px; background: var(--ink) }
details { border-bottom: 1px solid var(--line); padding: .35rem 0 } summary { cursor: pointer }
figure { margin: .6rem 0 1.2rem } figure img { width: 100%; max-width: 44rem; height: auto; background: #fff;
  border-radius: .4rem; display: block } figcaption { font-size: .88rem; max-width: 42rem; margin-top: .3rem }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .15rem 1rem; font-size: .9rem }
dt { color: var(--soft) } dd { margin: 0; min-width: 0 }
ul { padding-left: 1.2rem }
.three .bar { grid-template-columns: 1fr 4.6rem } .three .track { grid-column: 1 / -1; grid-row: 2 }
@media (max-width: 30rem) { .bar { grid-template-columns: 1fr 4.6rem; padding: .3rem 0 }
  .track { grid-column: 1 / -1; grid-row: 2 } dl { grid-template-columns: 1fr } dt { margin-top: .3rem } }
"""


@dataclass(frozen=True)
class Picture:
    png: bytes
    title: str
    caption: str


@dataclass(frozen=True)
class Source:
    """One run the page is made of: what, where and by which command."""

    title: str
    command: str
    environment: Mapping[str, str]


def page(answers: Answers, speed: Speed, pictures: Sequence[Picture], sources: Sequence[Source]) -> str:
    right = answers.all.ok and answers.all.given > 0 and not speed.wrong
    where = machine(sources[0].environment)
    parts = [
        "<h1>Is flash_attn_compat right on this machine?</h1>",
        f'<p class="soft">{_text(where)}<br>{_text(sources[0].environment.get("date", ""))}</p>',
        _verdict(answers, speed, right),
        _forced(sources),
        f'<p class="plain">{_text(in_plain_words(answers, speed, where))}</p>',
        _answers(answers),
        _speed(speed),
        _pictures(pictures),
        _machine(sources),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>flash_attn_compat: verify report</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def in_plain_words(answers: Answers, speed: Speed, where: str) -> str:
    """One paragraph for readers who have never heard of attention kernels."""
    score = answers.all
    known = f", {answers.recorded} of them answered by flash-attn itself beforehand" if answers.recorded else ""
    methods = len(answers.by_backend)
    by = f"in the {methods} ways it has of computing here, {score.given} answers in all" if methods > 1 else ""
    sentences = [
        (
            "Programs that understand and write text or draw pictures spend much of their time on one calculation, "
            "called attention."
        ),
        (
            "The best-known fast program for it, flash-attn, runs on certain graphics cards only; flash_attn_compat is "
            "meant to give the same answers everywhere."
        ),
        (
            f"For this page it was tried on one machine ({where}) with {answers.exercises} exercises whose right "
            f"answers are known{known}{', ' + by if by else ''}."
        ),
    ]
    if score.ok:
        sentences.append(
            "Every answer was right. Computers round numbers, so no answer is exact to the last digit; the one "
            f"furthest off used {score.worst:.0%} of the error that is allowed for rounding."
        )
    else:
        missed = score.given - score.right
        sentences.append(f"{missed} {'was' if missed == 1 else 'were'} wrong, so do not rely on it here.")
    for rival in filter(None, (speed.flash, speed.workaround)):
        sentences.append(_speed_in_words(speed.against(rival), rival))
    return " ".join(filter(None, sentences))


def _speed_in_words(pairs: Sequence[Pair], rival: str) -> str:
    if not pairs:
        return ""
    factors = [pair.times_as_fast for pair in pairs]
    factor, share = typical(factors), typical(pair.memory_share for pair in pairs)
    how = f"{factor:.1f} times as fast as" if factor > 1.1 else "about as fast as" if factor > 0.9 else "slower than"
    spread = f"{min(factors):.2g} to {max(factors):.2g} times its speed, {factor:.2f} on average"
    less = f", with {_percent(share)} of its memory on average" if share < 0.95 else ", with no less memory"
    memory = "" if math.isnan(share) else less
    jobs = f"On {len(pairs)} typical jobs" if len(pairs) > 1 else "On the job that was timed"
    return f"{jobs} it was {how} {_IN_WORDS[rival]} ({spread}){memory}."


_IN_WORDS = {
    "official": "flash-attn itself",
    "aten_flash": "the copy of flash-attn that PyTorch brings along",
    "pad_sdpa": "the usual workaround, which fills up short texts with blanks until all are equally long",
    "plain": "the calculation written down plainly",
    "sdpa_loop": "PyTorch's own function called for one text after the other",
}


# ---- sections -------------------------------------------------------------------------------------------------------


def _verdict(answers: Answers, speed: Speed, right: bool) -> str:
    score = answers.all
    if right:
        return f'<div class="verdict good">✓ All {score.given} answers are right.</div>'
    if not score.given:
        return '<div class="verdict bad">✗ No case ran here.</div>'
    timed = f", {len(speed.wrong)} of the timed ones wrong" if speed.wrong else ""
    return f'<div class="verdict bad">✗ {score.right} of {score.given} answers are right{timed}.</div>'


def _forced(sources: Sequence[Source]) -> str:
    forced = {source.environment.get("settings", "") for source in sources if forced_capability(source.environment)}
    if not forced:
        return ""
    return (
        '<p class="bad">The GPU was treated as another one (its capability was forced): the choice of backend is that '
        f"of the other GPU, every time is of this one. {_text('; '.join(sorted(forced)))}</p>"
    )


def _answers(answers: Answers) -> str:
    parts = [
        "<h2>Answers</h2>",
        (
            "<p>Each answer is held against the same calculation in 64-bit numbers, and against flash-attn's own "
            "answer where one was recorded. It is right if its error is at most twice that of plain PyTorch (three "
            "times for gradients), the criterion of flash-attn's own tests. The bars show how much of that the worst "
            "one used.</p>"
        ),
        '<div class="grid"><div><h3>By backend</h3>',
        _scores(answers.by_backend),
        "</div><div><h3>By function</h3>",
        _scores(answers.by_function),
        "</div></div>",
    ]
    if answers.wrong:
        shown = answers.wrong[:20]
        items = "".join(f'<li><span class="bad">{_text(case)}</span>: {_text(what)}</li>' for case, what in shown)
        more = f"<li>and {len(answers.wrong) - len(shown)} more</li>" if len(answers.wrong) > len(shown) else ""
        parts.append(f"<h3>Wrong answers</h3><ul>{items}{more}</ul>")
    if answers.idle:
        listed = "; ".join(f"{_text(name)} ({_text(why)})" for name, why in answers.idle)
        parts.append(f'<p class="soft">Not in use on this machine: {listed}.</p>')
    return "\n".join(parts)


def _scores(scores: Sequence[Score]) -> str:
    """Bars on a track that ends at 1.25 times the bound, with the bound marked."""
    rows = []
    for score in scores:
        if not score.given:
            continue
        kind = "good" if score.ok else "bad"
        label = f"{_broken(score.name)}<br><span class='{kind}'>{score.right} of {score.given} right</span>"
        worst = f"{score.worst:.0%}" if score.worst < 100 else ">100x"
        rows.append(_bar(label, score.worst / 1.25, worst, kind, mark=1 / 1.25))
    return f'<div class="bars">{"".join(rows)}</div>'


def _speed(speed: Speed) -> str:
    if not speed.workloads:
        return ""
    parts = ["<h2>Speed and memory</h2>"]
    if speed.wrong:
        parts.append(f'<p class="bad">Wrong or failed while timed: {_text(", ".join(speed.wrong))}</p>')
    for rival in filter(None, (speed.flash, speed.workaround)):
        if pairs := speed.against(rival):
            parts.append(_against(pairs, LABELS[rival]))
    numbers = f" Times are medians, in milliseconds, with {_text(speed.dtype)} numbers." if speed.dtype else ""
    parts.append(f"<h3>Every figure</h3><p class='soft'>Open a line for its bars.{numbers}</p>")
    parts += [_workload(workload) for workload in speed.workloads]
    return "\n".join(parts)


def _against(pairs: Sequence[Pair], rival: str) -> str:
    """Speed as bars to the left (slower) and right (faster) of an even race, memory as a share."""
    reach = max(1.0, *(abs(math.log2(pair.times_as_fast)) for pair in pairs))
    races = []
    for pair in pairs:
        end = 0.5 + 0.5 * math.log2(pair.times_as_fast) / reach
        races.append(_bar(_broken(pair.workload), end, f"{pair.times_as_fast:.2f} x", "ours", mark=0.5, start=0.5))
    speed = (
        f"<div><h3>Times as fast as {_text(rival)}</h3><p class='soft'>Forward. Right of the line is faster, left is "
        f"slower, each doubling equally far.</p><div class='bars'>{''.join(races)}</div></div>"
    )
    shares = [(pair.workload, pair.memory_share) for pair in pairs if pair.memory_share is not None]
    if not shares:
        return speed
    top = max(1.0, *(share for _, share in shares))
    bars = (_bar(_broken(name), share / top, _percent(share), "ours", mark=1 / top) for name, share in shares)
    return (
        f'<div class="grid">{speed}<div><h3>Peak memory, as a share of that</h3><p class="soft">Beyond the inputs. The '
        f"line marks equally much; shorter is less.</p><div class='bars'>{''.join(bars)}</div></div></div>"
    )


def _workload(workload: Workload) -> str:
    mine = workload.mine
    own = f"{_number(mine.forward_ms)} ms" if mine and mine.forward_ms else "not timed"
    described = f' <span class="soft">{_text(workload.description)}</span>' if workload.description else ""
    groups = []
    figures: tuple[tuple[str, Callable[[Entry], float | None], str], ...] = (
        ("forward", lambda entry: entry.forward_ms, "ms"),
        ("forward + backward", lambda entry: entry.both_ms, "ms"),
        ("peak memory beyond the inputs", lambda entry: entry.memory_mib, "MiB"),
    )
    for title, pick, unit in figures:
        known = [(entry, value) for entry in workload.entries if (value := pick(entry)) is not None]
        if known:
            top = max(value for _, value in known) or 1.0
            bars = "".join(
                _bar(_text(entry.label), value / top, f"{_number(value)} {unit}", _kind(entry))
                for entry, value in known
            )
            groups.append(f'<div><h3>{title}</h3><div class="bars">{bars}</div></div>')
    return (
        f"<details><summary><b>{_text(workload.name)}</b>: {own}{described}</summary>"
        f'<div class="grid three">{"".join(groups)}</div></details>'
    )


def _kind(entry: Entry) -> str:
    return "bad" if not entry.ok else "ours" if entry.ours else ""


def _pictures(pictures: Sequence[Picture]) -> str:
    if not pictures:
        return ""
    parts = [
        "<h2>Where the error is</h2>",
        (
            "<p>Each picture is one attention answer: a line for each head, from the first word on the left to the "
            "last on the right. Blue is nearer than rounding allows, white just so near, red is wrong.</p>"
        ),
    ]
    for picture in pictures:
        encoded = base64.b64encode(picture.png).decode()
        parts.append(
            f"<figure><h3>{_text(picture.title)}</h3>"
            f'<img alt="Heat map of the error over query row and head: {_text(picture.title)}" '
            f'src="data:image/png;base64,{encoded}"><figcaption>{_text(picture.caption)}</figcaption></figure>'
        )
    return "\n".join(parts)


def _machine(sources: Sequence[Source]) -> str:
    parts = ["<h2>The machine, and how to repeat this</h2>"]
    shown: list[dict[str, str]] = []
    for source in sources:
        facts = dict(source.environment)
        parts.append(f"<h3>{_text(source.title)}</h3><pre>{_text(source.command)}</pre>")
        known = {label: fact for label, fact in facts.items() if any(other.get(label) == fact for other in shown)}
        new = {label: fact for label, fact in facts.items() if label not in known}
        pairs = "".join(f"<dt>{_text(label)}</dt><dd>{_text(fact)}</dd>" for label, fact in new.items())
        if known:
            pairs += "<dt>the rest</dt><dd>as above</dd>"
        parts.append(f"<dl>{pairs}</dl>")
        shown.append(facts)
    return "\n".join(parts)


# ---- pieces ---------------------------------------------------------------------------------------------------------


def _bar(label: str, end: float, number: str, kind: str, mark: float | None = None, start: float = 0.0) -> str:
    """A label (markup), a bar from `start` to `end` of the track in either direction, a line at `mark`, the figure."""
    left, right = (100 * min(max(edge, 0.0), 1.0) for edge in sorted((start, end)))
    line = "" if mark is None else f'<span class="mark" style="left:calc({100 * mark:.1f}% - 1px)"></span>'
    return (
        f'<div class="bar {kind}"><span>{label}</span><span class="track"><span class="fill" '
        f'style="left:{left:.1f}%;width:{right - left:.1f}%"></span>{line}</span>'
        f'<span class="number">{_text(number)}</span></div>'
    )


def _broken(name: str) -> str:
    """A long name that may be broken after its underscores."""
    return _text(name).replace("_", "_<wbr>")


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _text(value: object) -> str:
    return html.escape(str(value))
