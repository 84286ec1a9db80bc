"""Checks that users run: `flash-attn-compat verify`, or `python -m verify` in a clone. The wheel contains them too.

Uses only flash_attn_compat's public functions; no module of the package imports verify.
"""

import sys
from pathlib import Path

_program = Path(sys.argv[0] if getattr(sys, "argv", None) else "")
_is_installed = _program.stem == "flash-attn-compat" or _program.parent.name == "flash_attn_compat"
# The command as the user typed it: in a clone, either of the two runs this package.
COMMAND = "python -m verify" if __name__ == "verify" and not _is_installed else "flash-attn-compat verify"
EXTRA = 'pip install "flash-attn-compat[verify]"'
