"""Runs the transformers tests under several versions of it, each in an environment of its own.

    python tests/clients/version_matrix.py [--versions 4.48.3 4.57.6 latest] [--directory DIR] [--torch 2.13.0]

Prints one line per version and exits with 1 if one of them fails. CI runs the newest version only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = [f"tests/clients/test_{name}.py" for name in ("transformers", "transformers_patching", "remote_code")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="+", default=["4.48.3", "4.57.6", "latest"])
    parser.add_argument("--directory", type=Path, help="where the environments are made and kept (default: temporary)")
    parser.add_argument("--torch", help="the version of torch (default: the one in constraints.txt)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        results = {
            version: run(version, directory / f"transformers-{version}", options.torch) for version in options.versions
        }
    for version, (installed, summary, _) in results.items():
        print(f"transformers {version:8} {installed:32} {summary}")
    return int(any(code for *_, code in results.values()))


def run(version: str, directory: Path, torch: str | None) -> tuple[str, str, int]:
    """What was installed, pytest's last line, its exit code."""
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(directory, with_pip=True)
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    # Old releases of transformers need older companions than the constraints name; torch and pytest stay pinned.
    pins = [
        line
        for line in constraints
        if line.startswith(("pytest", "einops")) or (line.startswith("torch") and not torch)
    ]
    wanted = [
        "transformers" if version == "latest" else f"transformers=={version}",
        "peft",
        "accelerate",
        "einops",
        "pytest",
        "pytest-xdist",
    ]
    wanted += [f"torch=={torch}"] if torch else ["torch"]
    (directory / "pins.txt").write_text("\n".join(pins))
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", directory / "pins.txt", *wanted], check=True)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    script = "import torch, transformers; print(transformers.__version__, 'torch', torch.__version__)"
    installed = subprocess.run([python, "-c", script], capture_output=True, text=True, env=environment).stdout.strip()
    command = [python, "-m", "pytest", "-q", "-rfs", "--show-capture=no", "--tb=short", *TESTS]
    answer = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    print(answer.stdout, answer.stderr, sep="\n", flush=True)
    return installed, (answer.stdout.strip().splitlines() or ["no output"])[-1], answer.returncode


if __name__ == "__main__":
    sys.exit(main())
