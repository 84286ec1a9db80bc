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
TESTS = [f"tests/clients/test_{name}.py" for name in ("transformers", "transformers_patching")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", nargs="+", default=["4.48.3", "4.57.6", "latest"])
    parser.add_argument("--directory", type=Path, help="where the environments are made and kept (default: temporary)")
    parser.add_argument("--torch", help="the version of torch (default: the one in constraints.txt)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        answers = [run(version, directory / f"transformers-{version}", options.torch) for version in options.versions]
    for installed, answer in answers:
        print(f"transformers {installed:40} {(answer.stdout.strip().splitlines() or ['no output'])[-1]}")
    return int(any(answer.returncode for _, answer in answers))


def run(version: str, directory: Path, torch: str | None) -> tuple[str, subprocess.CompletedProcess[str]]:
    """Return the installed version and pytest's last line."""
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(directory, with_pip=True)
    # Old releases of transformers need older companions than the constraints name; torch and pytest stay pinned.
    pinned = ("pytest", "einops") if torch else ("pytest", "einops", "torch")
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    (directory / "pins.txt").write_text("\n".join(line for line in constraints if line.startswith(pinned)))
    wanted = ["peft", "accelerate", "einops", "pytest", "pytest-xdist", f"torch=={torch}" if torch else "torch"]
    wanted.append("transformers" if version == "latest" else f"transformers=={version}")
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", directory / "pins.txt", *wanted], check=True)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    script = "import torch, transformers; print(transformers.__version__, 'torch', torch.__version__)"
    installed = subprocess.run([python, "-c", script], capture_output=True, text=True, env=environment).stdout.strip()
    command = [python, "-m", "pytest", "-q", "-rfs", "--show-capture=no", "--tb=short", *TESTS]
    answer = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    print(answer.stdout, answer.stderr, sep="\n", flush=True)
    return installed, answer


if __name__ == "__main__":
    sys.exit(main())
