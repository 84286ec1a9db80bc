"""python -m flash_attn_compat: the command line."""

import sys

from flash_attn_compat.cli import main

sys.exit(main())
