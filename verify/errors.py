"""The one error a command line may end in without a traceback."""


class UsageError(Exception):
    """Something the user asked for cannot be: one clear line, exit code 2."""
