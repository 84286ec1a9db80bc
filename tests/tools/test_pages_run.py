"""Each code block of a page runs when it is pasted alone. The tables below say why some cannot run here."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.tools.interpreters import forked
from tests.tools.test_docs import PAGES, ROOT, blocks, named

# A phrase of a Python block: the reason not to run the block.
PYTHON_NOT_RUN = {
    'device="cuda"': "needs a CUDA GPU",
    "import old_code": "needs the reader's own module",
    "for package in (flash_attn_compat, flash_attn)": "needs the wheel of fake-flash-attention, unpacked",
}
# A pattern of a command: the reason not to run the line. Another test checks the arguments of all these commands.
COMMANDS_NOT_RUN = {
    r"git clone|pip install|python3 -m venv|vllm serve|version_matrix": "downloads",
    r"flash-attn-compat install": "changes this environment; the tests of dropin install into one of their own",
    r"--gpu\b|-m gpu|--device cuda|vllm_serving|tests\.gpu --minutes|tests\.sanitize|kernel_tiles": "needs a GPU",
    r"flash-attn-compat tune|CUDA_LAUNCH_BLOCKING|CAPABILITY=7\.5": "needs a GPU",
    r"-m pytest|\.ci/(run|lint)": "tests and lint, which CI runs",
    r"(compat|-m) verify( |;|$)": "takes seconds to minutes; the tests of verify run its commands",
    r"flash-attn-compat compile|kernel_(report|ladder)|tests\.warm": "compiles or computes for minutes",
    r"benchmarks\.(cpu|host_time|end_to_end)": "takes minutes; the tests of the benchmarks run small ones",
    r"torch\.distributed\.run": "a group of processes; the tests of clients run the scripts",
    r"main\.py": "needs ComfyUI",
    r"\.ci/speed\.py": "needs the files of runs on a GPU",
    r"doctor \|": "README's block runs doctor",
    r"\bdist\b|check_wheel": "the package is built in CI, not here",
}
TRAIN = "import flash_attn, torch\nprint(flash_attn.__version__)\n"
ALONE = """
import os, sys, warnings
os.chdir({folder!r})
for number, text in {texts!r}:
    exec(compile(text, f"block {{number}}", "exec"), {{"__name__": "__main__"}})
    if "flash_attn_compat" in sys.modules:
        sys.modules["flash_attn_compat"].unpatch()
"""

with_python = [page for page in PAGES if any(blocks(page, "python"))]
with_commands = [page for page in PAGES if any(blocks(page, "bash"))]


def absent_modules(text: str) -> set[str]:
    """Return the modules that the block imports at its top level and that are not installed."""
    tops = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in tops if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in tops if isinstance(node, ast.ImportFrom) and node.module}
    roots = {name.partition(".")[0] for name in names} - {"flash_attn"}  # which `patch` brings
    return {root for root in roots if importlib.util.find_spec(root) is None}


def runs(text: str) -> bool:
    return not any(phrase in text for phrase in PYTHON_NOT_RUN)


def commands_to_run(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(line for line in lines if not any(re.search(pattern, line) for pattern in COMMANDS_NOT_RUN))


@pytest.mark.parametrize("page", with_python, ids=named)
def test_each_python_block_of_a_page_runs_alone(page: Path, tmp_path: Path) -> None:
    """Each block has names of its own, and no block finds the name flash_attn that an earlier block has patched."""
    texts = [(number, text) for number, text in enumerate(blocks(page, "python"), 1) if runs(text)]
    absent = {number: missing for number, text in texts if (missing := absent_modules(text))}
    there = [(number, text) for number, text in texts if number not in absent]
    (tmp_path / "my_kernel.py").touch()
    done = forked(ALONE.format(folder=str(tmp_path), texts=there))
    assert done.returncode == 0, done.stderr
    if absent:
        pytest.skip(f"blocks with modules that are not installed: {absent}")


@pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("page", with_commands, ids=named)
def test_each_block_of_commands_of_a_page_runs_alone(page: Path, tmp_path: Path) -> None:
    """Lines that cannot run here are left out; the others of a block run in an empty folder with a train.py."""
    (tmp_path / "train.py").write_text(TRAIN)
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "COLUMNS": "120",
    }
    for text in blocks(page, "bash"):
        script = commands_to_run(text).replace(".venv/bin/python", "python").strip()
        if script:
            command = ["bash", "-euo", "pipefail", "-c", script]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


def test_readmes_first_block_ends_with_a_command_that_this_file_runs() -> None:
    first = next(blocks(ROOT / "README.md", "bash"))
    assert commands_to_run(first).startswith("flash-attn-compat doctor")


def test_each_reason_not_to_run_a_block_concerns_a_block() -> None:
    python = [text for page in PAGES for text in blocks(page, "python")]
    commands = [line for page in PAGES for text in blocks(page, "bash") for line in text.splitlines()]
    assert [phrase for phrase in PYTHON_NOT_RUN if not any(phrase in text for text in python)] == []
    assert [pattern for pattern in COMMANDS_NOT_RUN if not any(re.search(pattern, line) for line in commands)] == []


@pytest.mark.parametrize("text", ["print(q)\n", "import flash_attn.bert_padding\n"], ids=["a name", "a patch"])
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn needs no patch here")
def test_a_block_that_needs_an_earlier_one_fails(text: str, tmp_path: Path) -> None:
    first = textwrap.dedent("""
        import flash_attn_compat
        flash_attn_compat.patch()
        q = 1
    """)
    done = forked(ALONE.format(folder=str(tmp_path), texts=[(1, first), (2, text)]))
    assert done.returncode == 1 and "block 2" in done.stderr
