"""What verify raises on purpose."""


class UsageError(Exception):
    """Something the user asked for cannot be: one clear line, exit code 2."""


class NotSupported(Exception):
    """An implementation declines a problem: no failure. The message is its first reason."""
