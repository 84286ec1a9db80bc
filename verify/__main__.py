"""The program. If the extra `verify` is not installed, it names the missing package in one line."""

from __future__ import annotations

import os
import sys

from . import COMMAND, EXTRA


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 all right, 1 something wrong, 2 senseless arguments."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some PyTorch releases announce each profile on stderr
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "torch", "einops", "flash_attn_compat"):
            raise
        print(f"{COMMAND}: {error.name} is not installed: {EXTRA}", file=sys.stderr)
        return 2
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
