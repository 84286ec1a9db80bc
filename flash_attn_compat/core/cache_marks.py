"""Marks in the keys of PyTorch's caches of compiled graphs on disk, one for each switch that changes graphs."""

from __future__ import annotations

import re
from typing import Any

import torch


def mark_caches(name: str, state: str | None) -> None:
    """Mark the keys of caches on disk in this thread with the state of a switch; None removes the mark.

    Before PyTorch 2.7, which stored no such graphs on disk, this changes nothing.
    """
    config: Any = getattr(torch.compiler, "config", None)
    tag = getattr(config, "cache_key_tag", None)
    if not isinstance(tag, str):
        return
    mark = "" if state is None else f"|flash_attn_compat.{name}={state}"
    new_tag = re.sub(rf"\|flash_attn_compat\.{name}=[^|]*", "", tag) + mark
    if tag != new_tag:
        config.cache_key_tag = new_tag
