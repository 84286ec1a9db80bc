"""Wheel and source distribution install the same files, and the wheel passes verify --quick away from the clone.

    .venv/bin/python .ci/check_install.py dist/*.whl dist/*.tar.gz

PyTorch and what verify needs are this environment's, lent by a .pth file; the package is not: it has to come from the
distribution.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

# What a kernel's author does: a file, in whatever folder, and no clone.
KERNEL = """
from torch.nn.functional import scaled_dot_product_attention

def plain(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
"""
PACKAGE = "import flash_attn_compat as package; print(package.__file__)"
ENV = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


class Fresh:
    """An environment with one distribution installed."""

    def __init__(self, distribution: Path, folder: Path) -> None:
        venv.create(folder / "env", with_pip=False)
        self.folder = folder
        self.scripts = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        python = self.scripts / Path(sys.executable).name
        self.site = Path(self.run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
        lent = [entry for entry in sys.path if Path(entry).name == "site-packages"]
        (self.site / "lent.pth").write_text("\n".join(lent) + "\n")
        options = ["-q", "--no-deps", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check"]
        self.run(sys.executable, "-m", "pip", "--python", python, "install", *options, distribution)
        origin = Path(self.run(python, "-c", PACKAGE))
        if not origin.is_relative_to(folder):
            sys.exit(f"{distribution.name} was installed, but flash_attn_compat is imported from {origin}")
        print(self.command("--version"), "from", distribution.name)

    def run(self, *command: object) -> str:
        """Its output; whatever fails ends this script."""
        arguments = [str(argument) for argument in command]
        done = subprocess.run(arguments, cwd=self.folder, env=ENV, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    def command(self, *arguments: str) -> str:
        return self.run(self.scripts / "flash-attn-compat", *arguments)

    def files(self) -> dict[str, bytes]:
        """The package's files and what the installation knows of them, without what names the distribution's file."""
        names = ("RECORD", "direct_url.json")
        found = (path for path in self.site.rglob("*") if path.is_file() and path.suffix != ".pyc")
        ours = (path for path in found if path.name not in names and path.parts[len(self.site.parts)].startswith("fl"))
        return {path.relative_to(self.site).as_posix(): path.read_bytes() for path in ours}


def verdict(told: str) -> str:
    return next(line for line in told.splitlines() if line.startswith("PASS"))


def main() -> None:
    wheel, source = (Path(argument).resolve() for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as of_wheel, tempfile.TemporaryDirectory() as of_source:
        by_wheel = Fresh(wheel, Path(of_wheel).resolve())
        first, second = by_wheel.files(), Fresh(source, Path(of_source).resolve()).files()
        if differing := [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]:
            sys.exit(f"wheel and source distribution install different files: {sorted(differing)}")
        print(f"{len(first)} files, the same by both")
        print(verdict(by_wheel.command("verify", "--quick")))
        Path(of_wheel, "kernel.py").write_text(KERNEL)
        print(verdict(by_wheel.command("verify", "--quick", "--implementation", "kernel.py:plain")))


if __name__ == "__main__":
    main()
