"""The command line: `python -m verify [compare] ...` and its sisters.

A subcommand is a module with `register(subparsers)`. A user's mistake is reported in one line, with exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from verify import bench, compare, ladder, locate, report
from verify.errors import UsageError

# One line for each subcommand; the first is what `python -m verify` alone does.
SUBCOMMANDS = (compare, bench, ladder, locate, report)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help shows what there is)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m verify", description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in SUBCOMMANDS:
        module.register(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command and gives its exit code: 0 all is well, 1 something is wrong, 2 the arguments make no sense."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv.insert(0, "compare")
    arguments = build_parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return command(arguments)
    except UsageError as error:
        print(f"python -m verify: {error}", file=sys.stderr)
        return 2
