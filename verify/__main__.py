"""`python -m verify`. Says in one line what is missing where the extra is not installed."""

import os
import sys

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some PyTorch releases announce each profile on stderr

try:
    from verify.cli import main
except ModuleNotFoundError as error:
    if error.name not in ("rich", "torch", "einops", "flash_attn_compat", "matplotlib"):
        raise
    print(
        f'python -m verify: {error.name} is not installed: pip install -c constraints.txt -e ".[verify]"',
        file=sys.stderr,
    )
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
