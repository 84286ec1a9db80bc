"""Real clients, unmodified, on this package under patch(). No hub is asked: models are tiny and random."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import flash_attn_compat


@pytest.fixture(scope="module")
def patched():
    with flash_attn_compat.patched():
        yield


@pytest.fixture
def calls():
    """Calls served by this package since the test began: equal results must not mean eager twice."""
    flash_attn_compat.reset_backend_counts()
    return lambda: sum(flash_attn_compat.backend_counts().values())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
