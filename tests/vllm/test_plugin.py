"""The plugin: which backend vLLM chooses with it, when it stays out, and that a wheel brings it."""

from __future__ import annotations

import builtins
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_attn_compat.vllm import plugin, versions
from tests.vllm.conftest import skip_reason

TRITON = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plugin logs; vLLM's loggers hand nothing to their parents."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(plugin._log, "handlers", [handler])
    monkeypatch.setattr(plugin._log, "level", logging.INFO)
    plugin._log_choice.cache_clear()
    return found


@pytest.fixture
def platform(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own platform of CUDA GPUs, which finds a GPU of capability 7.5 here; the plugin has seen it."""
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class Turing(cuda.CudaPlatformBase):  # type: ignore[misc]
        capability = 7, 5

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*cls.capability)

    monkeypatch.setattr(backend.nvrtc, "compiler", lambda: None)
    plugin.prefer_ours(Turing)
    return Turing


def config(**changes: Any) -> Any:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    given: dict[str, Any] = dict(head_size=128, dtype=torch.float16, kv_cache_dtype="auto", block_size=None)
    return AttentionSelectorConfig(**given | changes)


@pytest.fixture
def registry(backend: ModuleType) -> Iterator[Any]:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CUSTOM.clear_override()
    yield AttentionBackendEnum
    AttentionBackendEnum.CUSTOM.clear_override()


# ---- the choice


def test_turing_gets_our_backend_in_place_of_triton(platform: Any, lines: list[str]) -> None:
    assert platform.get_attn_backend_cls(None, attn_selector_config=config(), num_heads=8) == plugin.BACKEND
    assert platform.get_attn_backend_cls(None, config()) == plugin.BACKEND
    assert len(lines) == 1 and "FLASH_ATTN_COMPAT_VLLM=0" in lines[0]


@pytest.mark.parametrize("changes", [dict(use_mm_prefix=True), dict(dtype=torch.float32), dict(head_size=100)], ids=str)
def test_a_layer_that_we_decline_gets_triton_on_turing(
    platform: Any, lines: list[str], changes: dict[str, Any]
) -> None:
    assert platform.get_attn_backend_cls(None, config(**changes)) == TRITON
    assert "declines a layer" in lines[0]


def test_a_backend_that_the_user_named_is_kept(platform: Any, registry: Any) -> None:
    assert platform.get_attn_backend_cls(registry.TRITON_ATTN, config()) == TRITON


def test_ampere_gets_vllms_choice(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "capability", (8, 0))
    assert platform.get_attn_backend_cls(None, config()) != plugin.BACKEND


def test_a_gpu_that_counts_as_turing_gets_our_backend(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "capability", (9, 0))
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    assert platform.get_attn_backend_cls(None, config()) == plugin.BACKEND


def test_a_model_that_needs_triton_gets_it(platform: Any, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(plugin, "_models", lambda: versions.NEED_TRITON)
    assert platform.get_attn_backend_cls(None, config()) == TRITON


def test_a_failure_in_the_choice_leaves_it_to_vllm(
    platform: Any, backend: ModuleType, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    def fail(**given: Any) -> list[str]:
        raise TypeError("another interface")

    monkeypatch.setattr(backend.CompatBackend, "validate_configuration", fail)
    assert platform.get_attn_backend_cls(None, config()) == TRITON
    assert "another interface" in lines[0]


def test_the_choice_is_changed_once_however_often_the_plugin_loads(platform: Any) -> None:
    before = platform.get_attn_backend_cls.__func__
    plugin.prefer_ours(platform)
    assert platform.get_attn_backend_cls.__func__ is before


# ---- register


def test_register_names_our_backend_custom(backend: ModuleType, registry: Any, lines: list[str]) -> None:
    plugin.register()
    plugin.register()  # vLLM may do so
    assert registry.CUSTOM.get_class() is backend.CompatBackend and not lines


def test_zero_keeps_the_plugin_out_silently(registry: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_VLLM", "0")
    plugin.register()
    assert not registry.CUSTOM.is_overridden() and not lines


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "dev"])
def test_an_unknown_release_starts_without_us_and_a_line_says_why(
    registry: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    plugin.register()
    assert not registry.CUSTOM.is_overridden()
    (line,) = lines
    assert version in line and "\n" not in line


def test_one_lets_the_plugin_into_an_unknown_release(
    registry: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setenv("FLASH_ATTN_COMPAT_VLLM", "1")
    plugin.register()
    assert registry.CUSTOM.is_overridden() and not lines


def test_another_interface_is_named_even_where_any_release_may_load(
    backend: ModuleType, registry: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backend import AttentionImpl

    monkeypatch.setenv("FLASH_ATTN_COMPAT_VLLM", "1")
    monkeypatch.setattr(AttentionImpl, "forward", lambda self, layer, hidden_states: None)
    plugin.register()
    assert not registry.CUSTOM.is_overridden() and "AttentionImpl.forward takes self, layer, hidden_states" in lines[0]


def test_a_wrong_value_of_the_switch_is_a_line_and_no_exception(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_VLLM", "on")
    plugin.register()
    assert "FLASH_ATTN_COMPAT_VLLM must be 0 or 1" in lines[0]


def test_register_without_vllm_is_a_line_and_no_exception(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = builtins.__import__

    def without_vllm(name: str, *others: Any) -> Any:
        if name.split(".")[0] == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'")
        return ordinary(name, *others)

    monkeypatch.setattr(builtins, "__import__", without_vllm)
    plugin.register()
    assert "No module named 'vllm'" in lines[0]


# ---- what a wheel brings


def test_the_entry_point_leads_to_register() -> None:
    root = Path(plugin.__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        pytest.skip("the package is installed: its metadata is looked at instead")
    text = (
        (root / "pyproject.toml")
        .read_text(encoding="utf-8")
        .partition('[project.entry-points."vllm.general_plugins"]')[2]
    )
    assert text.split()[:3] == ["flash_attn_compat", "=", '"flash_attn_compat.vllm.plugin:register"']


def test_installed_metadata_names_the_plugin() -> None:
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "flash_attn_compat"]
    if not found:
        pytest.skip("flash-attn-compat was installed before it had the plugin, or not at all")
    assert {point.value for point in found} == {"flash_attn_compat.vllm.plugin:register"}
    assert found[0].load() is plugin.register


def test_importing_the_package_imports_nothing_of_vllm() -> None:
    code = "import sys, flash_attn_compat; assert not [m for m in sys.modules if 'vllm' in m.split('.')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_this_vllm_is_known() -> None:
    if reason := skip_reason():
        pytest.skip(reason)
    import vllm

    assert versions.decline_reason(vllm.__version__) is None
