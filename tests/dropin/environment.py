"""Stand-ins for other installations: a temporary virtual environment, and a flash_attn of another package."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from tests.tools.interpreters import WITHOUT_TORCH, Answer, forked

REPOSITORY = Path(__file__).resolve().parents[2]


def write_package(directory: Path, text: str | None, version: str | None = None, **modules: str) -> Path:
    """flash_attn/ with this __init__ (None: without one) and modules; metadata too if a version is given."""
    package = directory / "flash_attn"
    package.mkdir(parents=True)
    for name, content in (({} if text is None else {"__init__": text}) | modules).items():
        (package / f"{name}.py").write_text(content)
    if version is not None:
        info = directory / f"flash_attn-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {version}\n")
        (info / "top_level.txt").write_text("flash_attn\n")
    return package


class Environment:
    """A venv without packages of its own that sees this interpreter's and the repository."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=os.name != "nt")
        self.python = next(path for path in directory.glob("*/python*") if path.stem == "python")
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site_packages = Path(self.call("-c", script).stdout.strip())
        outer = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
        (self.site_packages / "outer.pth").write_text("\n".join([str(REPOSITORY), *outer]) + "\n")
        self.clean = self.files()

    def call(self, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
        # Away from the repository, so that only the installation can answer.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.python), *arguments], capture_output=True, text=True, cwd=self.python.parent, env=env, **options
        )

    def forked(self, code: str) -> Answer:
        """As ``call("-c", code)`` in a copied interpreter, where PyTorch seems not to be imported yet."""
        start = f"import site; site.addsitedir({str(self.site_packages)!r})\n"
        return forked(f"{WITHOUT_TORCH}\n{start}{code}", **os.environ)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call("-m", "flash_attn_compat", *arguments)

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call("-m", "pip", "--disable-pip-version-check", *arguments)

    def files(self) -> set[str]:
        return {path.relative_to(self.site_packages).as_posix() for path in self.site_packages.rglob("*")}
