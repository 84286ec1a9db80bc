"""Draws the masks of docs/flex.md: `python -m benchmarks.flex_pictures` writes SVG files from PyTorch's BlockMasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

FOLDER = Path(__file__).parent.parent / "docs/images"
TOKENS, BLOCK, PIXELS = 512, 64, 24
FULL, PARTIAL, GRID = "#1f5fa8", "#9cc3eb", "#d0d7de"


def documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Causal attention inside of documents of 224, 96 and 192 tokens."""
    number = lambda at: (at >= 224).int() + (at >= 320).int()  # noqa: E731
    return (q >= kv) & (number(q) == number(kv))


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv <= 160)


def prefix(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv < 192) | (q >= kv)


PICTURES: dict[str, Callable[..., Tensor]] = {"documents": documents, "window": window, "prefix": prefix}


def states(mask: BlockMask) -> Tensor:
    """Return a number for each block of a BlockMask: 0 hidden, 1 partial, 2 full."""
    found = torch.zeros(TOKENS // BLOCK, TOKENS // BLOCK, dtype=torch.int)
    for state, num, indices in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        if num is None or indices is None:
            continue
        for row in range(len(found)):
            found[row, indices[0, 0, row, : int(num[0, 0, row])].long()] = state
    return found


def draw(title: str, mask: BlockMask) -> str:
    """Return a mask as SVG."""
    found, side = states(mask), TOKENS // BLOCK * PIXELS
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side + 2}" height="{side + 2}" role="img">',
        f"<title>{title}</title>",
    ]
    for row in range(len(found)):
        for column in range(len(found)):
            fill = ("#ffffff", PARTIAL, FULL)[int(found[row, column])]
            place = f'x="{1 + column * PIXELS}" y="{1 + row * PIXELS}" width="{PIXELS}" height="{PIXELS}"'
            lines.append(f'<rect {place} fill="{fill}" stroke="{GRID}"/>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    for name, mask_mod in PICTURES.items():
        mask = create_block_mask(mask_mod, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=BLOCK)
        (FOLDER / f"flex_{name}.svg").write_text(draw(f"Blocks of the mask {name}", mask), encoding="utf-8")


if __name__ == "__main__":
    main()
