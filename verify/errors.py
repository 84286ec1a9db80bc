"""The exceptions that verify raises on purpose."""


class UsageError(Exception):
    """The user asked for something impossible. The message is one line; exit code 2."""


class NotSupported(Exception):
    """An implementation declines a problem, which is no failure. The message is its first reason."""
