"""The package `kernels`, which loads kernels of Hugging Face's hub, takes our build of flash-attn2 for a download."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import flash_attn_compat
from flash_attn_compat import fa3, flash_attn_func
from flash_attn_compat.dropin.hub_kernels import FOLDERS, LOCAL_KERNELS, NAMES
from tests.tools.interpreters import forked_child

GET = """
import kernels
got = kernels.get_kernel("kernels-community/{name}", {which})
import flash_attn_compat as ours
assert got.flash_attn_func is ours.flash_attn_func and got.flash_attn_with_kvcache is ours.flash_attn_with_kvcache
"""


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("flash-attn2", "version=3"),
        ("flash-attn2", "version=4"),
        ("flash-attn2", "revision='v1'"),
        ("flash-attn", "revision='main'"),
    ],
)
def test_get_kernel_gives_our_functions_in_a_child_too(name: str, which: str) -> None:
    pytest.importorskip("kernels", reason="kernels is not installed")
    with flash_attn_compat.patched(hub_kernels=True):
        answer = forked_child(GET.format(name=name, which=which))
    assert answer.returncode == 0, answer.stderr[-3000:]


GET_FA3 = """
import kernels
fa3 = kernels.get_kernel("kernels-community/flash-attn3", revision="main").flash_attn_interface
from flash_attn_compat import fa3 as ours
assert fa3.flash_attn_func is ours.flash_attn_func
"""


def test_get_kernel_gives_flash_attention_3s_interface() -> None:
    pytest.importorskip("kernels", reason="kernels is not installed")
    with flash_attn_compat.patched(hub_kernels=True):
        answer = forked_child(GET_FA3)
    assert answer.returncode == 0, answer.stderr[-3000:]


ENTRIES = [f"{name}={folder}" for name, folder in FOLDERS.items()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ENTRIES),
        ("another/kernel=/there", ["another/kernel=/there", *ENTRIES]),
        (f"{NAMES[0]}=/theirs", [f"{NAMES[0]}=/theirs", *ENTRIES[1:]]),
        (f"{NAMES[1]}=/theirs:{NAMES[0]}=/theirs", [f"{NAMES[1]}=/theirs", f"{NAMES[0]}=/theirs", ENTRIES[2]]),
    ],
)
def test_the_setting_keeps_its_value_and_is_restored(
    given: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCAL_KERNELS, raising=False)
    if given is not None:
        monkeypatch.setenv(LOCAL_KERNELS, given)
    with flash_attn_compat.patched(hub_kernels=True):
        assert os.environ[LOCAL_KERNELS] == ":".join(expected)
    assert os.environ.get(LOCAL_KERNELS) == given
    with flash_attn_compat.patched():
        assert os.environ.get(LOCAL_KERNELS) == given


BUILDS = [build for folder in sorted(set(FOLDERS.values())) for build in sorted(folder.glob("torch-*"))]


@pytest.mark.parametrize("build", BUILDS, ids=[f"{build.parent.name}-{build.name}" for build in BUILDS])
def test_each_hub_build_names_its_torch_variant(build: Path) -> None:
    assert len(BUILDS) == 10
    told = json.loads((build / "metadata.json").read_text())
    backend, version = told["backend"]["type"], build.parent.name[-1]
    assert build.name == f"torch-{backend}" and told["id"].endswith(backend) and told["name"] == f"flash-attn{version}"
    found: dict[str, Any] = {}
    exec((build / "__init__.py").read_text(), found)
    assert found["flash_attn_func"] is found["flash_attn_interface"].flash_attn_func
    assert found["flash_attn_func"] is (fa3.flash_attn_func if version == "3" else flash_attn_func)


@pytest.mark.usefixtures("patched")
def test_diffusers_finds_it_by_its_own_names() -> None:
    pytest.importorskip("kernels", reason="kernels is not installed")
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    with flash_attn_compat.patched(hub_kernels=True):
        answer = forked_child(DIFFUSERS)
    assert answer.returncode == 0, answer.stderr[-3000:]


DIFFUSERS = """
import torch, flash_attn_compat
from diffusers.models import attention_dispatch as dispatch
q, k, v = (torch.randn(1, 6, 2, 16) for _ in range(3))
for name in ("flash_hub", "flash_varlen_hub"):
    backend = dispatch.AttentionBackendName(name)
    dispatch._maybe_download_kernel_for_backend(backend)
    flash_attn_compat.reset_backend_counts()
    found = dispatch.dispatch_attention_fn(q, k, v, backend=backend)
    assert flash_attn_compat.backend_counts(), name
    expected = dispatch.dispatch_attention_fn(q, k, v, backend=dispatch.AttentionBackendName.NATIVE)
    torch.testing.assert_close(found, expected)
"""
