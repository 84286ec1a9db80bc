"""A distribution installs in a fresh environment and passes verify --quick there, away from the clone.

    .venv/bin/python .ci/check_install.py dist/flash_attn_compat-0.1.0-py3-none-any.whl

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


def verdict(told: str) -> str:
    return next(line for line in told.splitlines() if line.startswith("PASS"))


def main() -> None:
    distribution = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary).resolve() / "env"
        venv.create(fresh, with_pip=False)
        scripts = fresh / ("Scripts" if os.name == "nt" else "bin")
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}

        def run(*command: object) -> str:
            """Its output; whatever fails ends this script."""
            arguments = [str(argument) for argument in command]
            return subprocess.run(
                arguments, cwd=temporary, env=env, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        python = scripts / Path(sys.executable).name
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
        lent = [entry for entry in sys.path if Path(entry).name == "site-packages"]
        (site / "lent.pth").write_text("\n".join(lent) + "\n")
        options = ["-q", "--no-deps", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check"]
        run(sys.executable, "-m", "pip", "--python", python, "install", *options, distribution)
        origin = Path(run(python, "-c", PACKAGE).strip())
        if not origin.is_relative_to(fresh):
            sys.exit(f"{distribution.name} was installed, but flash_attn_compat is imported from {origin}")
        command = scripts / "flash-attn-compat"
        print(run(command, "--version").strip(), "from", distribution.name)
        print(verdict(run(command, "verify", "--quick")))
        Path(temporary, "kernel.py").write_text(KERNEL)
        print(verdict(run(command, "verify", "--quick", "--implementation", "kernel.py:plain")))


if __name__ == "__main__":
    main()
