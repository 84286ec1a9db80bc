"""The layers of the package: no import goes upwards or in a circle; and the length of files."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "flash_attn_compat"
COMMANDS = ("progress", "output_path", "isolation", "card", "gpu_state", "self_check", "doctor", "tune", "cli")
# Bottom to top. A name stands for its submodules too, unless they are named themselves; "" is the package itself.
LAYERS = (
    ("settings", "installed", "bert_padding"),
    ("core",),  # values and arithmetic
    (
        "backends.base",
        "backends.varlen",
        "backends.scores",
        "backends.compilation",
        "backends.alibi",
        "backends.unwritten",
    ),
    ("backends.fused.choosing",),
    ("backends.fused.building",),
    ("backends.fused.tuning",),
    ("backends.fused.launching",),
    ("backends.reference",),
    ("backends.fused.judging",),
    ("backends",),
    ("dispatch.pytorch",),
    ("dispatch",),
    ("private_interface", "kvcache", "flash_attn_2_cuda"),  # of which none knows another
    ("flash_attn_interface",),
    ("api_2_6", "fa3", "fa4", "flash_attn_triton", "layers", "losses", "modules", "ops", "utils"),
    ("torch_sdpa", "torch_flex", "vllm"),
    ("dropin",),
    ("", *COMMANDS, "__main__"),
)
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}
# Stand-ins that other interpreters find; their imports are those of a client.
SITES = (
    "dropin.site.",
    "dropin.site_start.",
    "dropin.site_2_6.",
    "dropin.site_fa3.",
    "dropin.site_fa4.",
    "dropin.hub_flash_attn2.",
    "dropin.hub_flash_attn3.",
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {name: path for path in PACKAGE.rglob("*.py") if not (name := module_name(path)).startswith(SITES)}


@functools.cache
def imported(path: Path) -> set[str]:
    """The package's modules that a file imports, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if inside(name) in MODULES}
            found |= modules if modules == names else modules | {node.module}
    return {name for name in map(inside, found) if name in MODULES}


def inside(name: str) -> str | None:
    return name.removeprefix("flash_attn_compat").removeprefix(".") if name.startswith("flash_attn_compat") else None


def layer(module: str) -> int:
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    known = [name for name in names if name in LAYER_OF]
    assert known, f"{module} has no layer: add {parts[0]!r} to LAYERS in tests/tools/test_architecture.py"
    return LAYER_OF[known[0]]


def test_nothing_imports_upwards() -> None:
    arrows = [(module, name) for module, path in MODULES.items() for name in imported(path)]
    assert arrows and not [(module, name) for module, name in arrows if layer(name) > layer(module)]


def test_a_module_without_a_layer_is_named_with_the_table_that_lacks_it() -> None:
    with pytest.raises(AssertionError, match=r"foo\.bar has no layer: add 'foo' to LAYERS in tests"):
        layer("foo.bar")


def test_no_door_of_the_functions_leads_through_another() -> None:
    doors = {"private_interface", "kvcache", "flash_attn_2_cuda"}
    assert not [door for door in doors if doors & imported(MODULES[door])]


def test_nothing_imports_in_a_circle() -> None:
    # A package and its own submodules are one room: whoever imports the one runs the other.
    graph = {
        name: {other for other in imported(path) if not is_package_of(other, name)} for name, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_package_does_not_import_verify_which_a_wheel_has_in_it() -> None:
    for path in MODULES.values():
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not {name for name in names if "verify" in name.split(".")}, path


def is_package_of(package: str, module: str) -> bool:
    return package == "" or module.startswith(f"{package}.")


def test_a_backend_never_looks_at_another_one() -> None:
    """But for the reference, the judge of kernels before their first call."""
    from flash_attn_compat.backends import BACKENDS

    homes = {type(backend).__module__.removeprefix("flash_attn_compat.") for backend in BACKENDS}
    for module, path in MODULES.items():
        home = next((home for home in homes if module == home or module.startswith(f"{home}.")), None)
        if home is not None:
            others = homes - {home, "backends.reference"}
            assert not [name for name in imported(path) if any(f"{name}.".startswith(f"{other}.") for other in others)]


def test_no_source_file_is_longer_than_500_lines() -> None:
    root = PACKAGE.parent
    files = [
        path for folder in ("flash_attn_compat", "verify", "benchmarks", "tests") for path in (root / folder).rglob("*")
    ]
    sources = [path for path in files if path.suffix in {".py", ".cu", ".cuh"}]
    assert sources and not [path.name for path in sources if path.read_bytes().count(b"\n") > 500]


def test_the_table_of_types_names_every_class_that_core_and_dispatch_share() -> None:
    table = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("## Types")[2].partition("## Words")[0]
    modules = {name: path for name, path in MODULES.items() if name.startswith(("core.", "dispatch."))}
    classes = {
        node.name
        for name, path in modules.items()
        for node in ast.parse(path.read_text()).body
        if not name.startswith("core.flex.")  # a language of its own: docs/flex.md
        and isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
    }
    assert classes and not {name for name in classes if f"`{name}`" not in table}


@pytest.mark.parametrize("folder", ["core", "dispatch"])
def test_a_folder_of_the_core_and_dispatch_has_at_most_15_files(folder: str) -> None:
    folders = {path.parent for path in (PACKAGE / folder).rglob("*.py")}
    assert folders and not {path for path in folders if len([*path.glob("*.py")]) > 15}
