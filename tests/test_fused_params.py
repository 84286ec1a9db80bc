"""The struct that kernels get: Python packs the very bytes that C reads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flash_attn_compat.backends.fused import loader, params


def c_layout(folder: Path) -> dict[str, int]:
    """Offsets of the struct's fields and its size, as a C++ compiler lays it out."""
    lines = [f'  printf("{name} %zu\\n", offsetof(Params, {name}));' for name, _ in params.FIELDS]
    program = "\n".join(
        [
            "#include <cstddef>",
            "#include <cstdio>",
            '#include "params.cuh"',
            "int main() {",
            *lines,
            '  printf("size %zu\\n", sizeof(Params));',
            "}",
        ]
    )
    (folder / "layout.cpp").write_text(program)
    binary = folder / "layout"
    command = ["g++", "-std=c++17", "-w", f"-I{loader.SOURCES}", str(folder / "layout.cpp"), "-o", str(binary)]
    subprocess.run(command, check=True)
    printed = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout
    return {name: int(offset) for name, offset in (line.split() for line in printed.splitlines())}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to ask for the layout of the C struct")
def test_python_and_c_agree_on_every_field(tmp_path: Path) -> None:
    assert c_layout(tmp_path) == {**params.offsets(), "size": params.SIZE}


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(KeyError, match="seqlen_x"):
        params.pack({"seqlen_x": 1})
