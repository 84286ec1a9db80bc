"""The machine behind a result: device, capability (real or forced), versions, date."""

from __future__ import annotations

import datetime
import os
import platform

import torch

import flash_attn_compat

from .errors import UsageError


def checked_devices(wanted: list[str]) -> list[str]:
    """Return the wanted devices, or all: the CPU, and the first CUDA (or ROCm) and MPS device.

    Raises UsageError for an absent device.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    present = [name for name in there if there[name]]
    known = {*present, *(f"cuda:{index}" for index in range(torch.cuda.device_count()))}
    for name in wanted:
        if name not in known:
            raise UsageError(f"no device {name!r} here; choose from {', '.join(present)}")
    return wanted or present


def describe_device(device: str) -> str:
    """Return one line: the device's name and, for CUDA, its capability, real and forced."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return f"{_cpu_name()}, {torch.get_num_threads()} threads"
    if kind != "cuda":
        return f"{device.upper()} on {platform.machine()}"
    major, minor = torch.cuda.get_device_capability(device)
    forced = os.environ.get("FLASH_ATTN_COMPAT_CAPABILITY")
    real = f"capability {major}.{minor}"
    return f"{torch.cuda.get_device_name(device)}, {real}" + (f" treated as {forced} (forced)" if forced else "")


def describe(devices: list[str]) -> dict[str, str]:
    """Return the facts that a reader needs to judge or repeat a result, by label."""
    facts = {f"device {device}": describe_device(device) for device in devices}
    facts["flash_attn_compat"] = flash_attn_compat.__version__
    facts["torch"] = torch.__version__ + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else "")
    facts["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    settings = {name: value for name, value in os.environ.items() if name.startswith("FLASH_ATTN_COMPAT_")}
    if settings:
        facts["settings"] = " ".join(f"{name}={value}" for name, value in sorted(settings.items()))
    facts["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return facts


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
