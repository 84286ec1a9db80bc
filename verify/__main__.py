"""The program. Says in one line what is missing where the extra is not installed."""

from __future__ import annotations

import os
import sys

from . import COMMAND, EXTRA


def main(argv: list[str] | None = None) -> int:
    """Runs one command and gives its exit code: 0 all is well, 1 something is wrong, 2 the arguments make no sense."""
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
