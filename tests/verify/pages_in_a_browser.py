"""verify's pages in a browser: at the widths of a phone and a desktop, in light and dark.

    python -m pytest -n 0 tests/verify/pages_in_a_browser.py

No part of the suite: a browser takes seconds to start, and few machines that run the suite have one.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from verify.page import to_html
from verify.tables import Bar, Bars, Curves, Report, Table

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed")
WIDTHS = (400, 1280)

NAME = "my_package.attention.kernels:flash_attention_forward"
LONG = "random #17 Problem(kind='varlen_kvpacked', seqlens_q=(37, 1, 0, 70), seqlens_k=(52, 9, 8, 64), softcap=4.0)"
NOTE = "out error 8.640e-04, allowed 3.405e-06 in sequence 1, head 2, 8 of 8 like this; as near as fp16 comes"
EVERY = Table(
    "Every answer",
    ("case", "backend", "device", "vs official", "vs fp64", "verdict", "note"),
    [
        ("kvcache paged 16", "torch_efficient", "cuda:1", "softmax_lse 1.2e-03 (0.6)", "dq 4.9e-04 (0.2)", "pass", ""),
        (LONG, NAME, "cpu", "", "out 1.0e-03 (2e+11)", "FAIL", NOTE),
        ("dense alibi", NAME, "cpu", "", "", "declined", "got an unexpected keyword argument 'alibi_slopes'"),
    ],
)  # fmt: skip
SPEED = Table(
    "Ours, forward / forward + backward, and its speed-up over the others",
    ("workload", "served by", "ms", "MiB", "flash-attn ms", "speed-up", "fastest other", "speed-up", "answer"),
    [("decode_8x4096_d64_paged_append in a graph", "fused, torch_flash with gradients", "0.0412 / 0.123", "3.1 / 22.5",
      "0.0409 / 0.119", "0.993 / 0.967", "sdpa_loop / pad_sdpa", "12.33 / 4.56", "not supported")],
)  # fmt: skip
PICTURES = (
    Bars("Speed beside flash-attn: longer is faster", "flash-attn", ["forward", "forward + backward"],
         [(SPEED.rows[0][0], [Bar(0.99, "0.99 (0.0412 ms)"), Bar(7.5, "7.50 (0.123 ms)", wrong=True)])] * 3),
    Curves("Time", "N (sequence length)", "ms",
           [(f"step {i}: FlashAttention, algorithm 0 by blocks", [(n, n * i / 1e9) for n in (128, 512, 2048)])
            for i in range(1, 7)]),
)  # fmt: skip
FACTS = {"device cuda": "NVIDIA H200, capability 9.0 treated as 7.5 (forced)", "inputs": LONG}


def page() -> str:
    lines = ["A REMARK " + NOTE, "PASS: 3 of 3 answers right"]
    title = "Is flash_attn_compat right on this machine?"
    ours = Report("verify compare", FACTS, [EVERY, SPEED], lines, True, pictures=PICTURES)
    theirs = Report("verify compare", FACTS, [], [f"FAIL: {NOTE}"], False, NAME)
    return to_html(title, {"ours.json": ours, "theirs.json": theirs})


# The defects: words that go on in another line, cells narrower than their longest word, a page that scrolls sideways,
# pictures that leave it, cut words in pictures, letters there below 8 pixels, words that hardly differ from the ground.
PROBE = """
<script>
function luminance(colour) {
  const shares = colour.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255);
  const of = shares.map(x => x <= .04 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
  return .2126 * of[0] + .7152 * of[1] + .0722 * of[2];
}
function found(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, wrong = [];
  page.querySelectorAll("details").forEach(each => each.open = true);
  const ground = page.createElement("div");
  ground.style.background = "Canvas";
  page.body.append(ground);
  const behind = luminance(view.getComputedStyle(ground).backgroundColor);
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, parent = node.parentElement;
    if (parent.closest("script, style, svg")) continue;
    for (const word of node.data.matchAll(/[^\\s-]+/g)) {
      const range = page.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(each => Math.round(each.top)));
      if (lines.size > 1) wrong.push("broken: " + word[0]);
      const right = range.getBoundingClientRect().right;
      if (right > view.innerWidth && !parent.closest("details")) wrong.push("outside: " + word[0]);
    }
    if (node.data.trim()) {
      const front = luminance(view.getComputedStyle(parent).color);
      const contrast = (Math.max(front, behind) + .05) / (Math.min(front, behind) + .05);
      if (contrast < 4.5) wrong.push("faint: " + node.data);
    }
  }
  for (const cell of page.querySelectorAll("td, th"))
    if (cell.scrollWidth > cell.clientWidth + 1) wrong.push("narrow: " + cell.textContent);
  for (const each of page.querySelectorAll("svg"))
    if (each.getBoundingClientRect().right > view.innerWidth) wrong.push("picture outside");
  for (const text of page.querySelectorAll("svg text")) {
    const inner = text.getBoundingClientRect(), outer = text.closest("svg").getBoundingClientRect();
    if (inner.height < 8) wrong.push("small: " + text.textContent);
    if (inner.right > outer.right + 1 || inner.left < outer.left - 1) wrong.push("cut: " + text.textContent);
  }
  if (page.documentElement.scrollWidth > view.innerWidth) wrong.push("scrolls sideways");
  return {width: view.innerWidth, dark: behind < .5, words: page.body.innerText.length, wrong};
}
onload = () => document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(found));
</script>
"""


def browse(path: Path, *options: str) -> str:
    assert BROWSER is not None
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", profile, *options]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_word_is_broken_no_cell_too_narrow_and_nothing_faint(dark, tmp_path):
    frames = "".join(f'<iframe width="{w}" height="900" srcdoc="{html.escape(page())}"></iframe>' for w in WIDTHS)
    (tmp_path / "probe.html").write_text(f"<!doctype html><title></title>{frames}{PROBE}", encoding="utf-8")
    shown = browse(tmp_path / "probe.html", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom")
    answer = re.search(r"<title>(.+?)</title>", shown)
    assert answer, shown[:2000]
    found = json.loads(html.unescape(answer[1]))
    assert [(each["dark"], each["words"] > 1000) for each in found] == [(dark, True)] * 2
    assert [each["wrong"] for each in found] == [[], []]


@pytest.mark.parametrize(("width", "scheme"), [(400, 0), (1280, 1)], ids=["phone, dark", "desk, light"])
def test_the_page_can_be_looked_at(width, scheme, tmp_path):
    """The pictures stay in pytest's folder, for people."""
    (tmp_path / "page.html").write_text(page(), encoding="utf-8")
    picture = tmp_path / f"page-{width}.png"
    window = f"--window-size={width},2400"
    browse(tmp_path / "page.html", f"--blink-settings=preferredColorScheme={scheme}", window, f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 40_000
