"""The struct that kernels get: Python packs the very bytes that C reads."""

from __future__ import annotations

import shutil
import struct
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


def test_every_field_of_the_c_struct_is_packed() -> None:
    text = loader.source("params.cuh").partition("struct Params {")[2].partition("};")[0]
    declared = {
        name.strip(" *")
        for line in text.splitlines()
        for declaration in line.partition("//")[0].split(";")
        if declaration.strip()
        for name in declaration.strip().removeprefix("const ").partition(" ")[2].split(",")
    }
    assert declared == {name for name, _ in params.FIELDS}


def test_fields_lie_where_offsets_says() -> None:
    packed = params.pack({"q": 7, "k_s": (1, 2, 3), "window_left": -1, "softcap": 0.5})
    at = params.offsets()
    assert len(packed) == params.SIZE
    assert struct.unpack_from("<Q", packed, at["q"]) == (7,)
    assert struct.unpack_from("<qii", packed, at["k_s"]) == (1, 2, 3)
    assert struct.unpack_from("<i", packed, at["window_left"]) == (-1,)
    assert struct.unpack_from("<f", packed, at["softcap"]) == (0.5,)
    assert struct.unpack_from("<Q", packed, at["lse"]) == (0,)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(KeyError, match="seqlen_x"):
        params.pack({"seqlen_x": 1})
