"""Every function has the arguments of flash-attn's function, by tests/mirror/signatures.txt."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import flash_attn_interface

LINES = [line for line in (Path(__file__).parent / "signatures.txt").read_text().splitlines() if line[0] != "#"]
SIGNATURES = dict(line[:-1].split("(", 1) for line in LINES if "::" not in line)
SCHEMAS = [line for line in LINES if "::" in line]
PRIVATE = [name for name in SIGNATURES if ".flash_attn_interface._flash" in name and "2_6" not in name]


def found(name: str) -> object:
    module, _, attribute = name.removesuffix(".forward").rpartition(".")
    value: object = getattr(importlib.import_module(module), attribute)
    return value.forward if name.endswith(".forward") else value  # type: ignore[attr-defined]


@functools.cache
def extensions() -> set[str]:
    """Keywords that a function documents as ours: at the end, without effect unless given."""
    docs = "\n".join(inspect.getdoc(found(name)) or "" for name in SIGNATURES)
    lines = re.findall(r"^ *([a-z_, ]+) \[not in flash-attn", docs, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_match_flash_attn(name: str) -> None:
    parameters = list(inspect.signature(found(name)).parameters.values())  # type: ignore[arg-type]
    ours = [p for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY]
    assert all(p.name in extensions() and p.default is None for p in ours)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if p not in ours]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


@pytest.mark.parametrize("name", PRIVATE)
def test_getfullargspec_finds_the_arguments_as_ring_attention_looks_for_them(name: str) -> None:
    function = found(name)
    spec = inspect.getfullargspec(function if inspect.isfunction(function) else function._init_fn)  # type: ignore[attr-defined]
    assert spec.args == [part.split("=")[0] for part in SIGNATURES[name].split(", ")]
    assert (
        spec.varargs is None
        and extensions().issuperset(spec.kwonlyargs)
        and len(spec.defaults or ()) == SIGNATURES[name].count("=")
    )


def test_the_package_has_the_interfaces_functions() -> None:
    for name in (name.rpartition(".")[2] for name in SIGNATURES if ".flash_attn_interface.flash_attn" in name):
        assert getattr(flash_attn_compat, name) is getattr(flash_attn_interface, name)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_operators_have_flash_attns_schema(schema: str) -> None:
    with flash_attn_compat.patched():
        importlib.import_module("flash_attn")
        operator = getattr(torch.ops.flash_attn, schema.partition("::")[2].partition("(")[0])
    assert str(operator.default._schema) == schema
