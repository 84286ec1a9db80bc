"""Where tests found the oracle before it moved to verify."""

from verify.oracle import *  # noqa: F403
