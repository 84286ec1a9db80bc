"""`python -m benchmarks.turing_sm`."""

import sys

from benchmarks.turing_sm import main

sys.exit(main())
