"""Checks, locates, compares and times attention kernels.

A subcommand is a module with `add_arguments(parser)` and `main(arguments)`, which returns the exit code. Its docstring
begins "`python -m verify NAME`: purpose". A user's mistake gives one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import NoReturn

from . import COMMAND, bench, compare, ladder, locate, report
from .errors import UsageError
from .output import add_output_arguments
from .reading import printable

SUBCOMMANDS = (compare, bench, ladder, locate, report)  # the first is the default
EXIT_CODES = (
    "Exit code 0: all is right, or the same; 1: something is wrong, or differs; 2: the arguments make no sense."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)} (--help shows the options)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=COMMAND,
        description=textwrap.fill(f"{__doc__.splitlines()[0]} {EXIT_CODES}", 78),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in SUBCOMMANDS:
        what = (module.__doc__ or "").partition("`: ")[2].partition("\n\n")[0].strip()
        name = module.__name__.rpartition(".")[2]
        sub = subparsers.add_parser(name, help=what, description=f"{what[:1].upper()}{what[1:]} {EXIT_CODES}")
        module.add_arguments(sub)
        if module is not report:
            add_output_arguments(sub)
        sub.set_defaults(run=module.main)
        if module is compare:
            parser.epilog = "without a command, or with compare:\n" + sub.format_help().partition("options:\n")[2]
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 all right, 1 something wrong, 2 senseless arguments."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv.insert(0, "compare")
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except UsageError as error:
        print(f"{COMMAND}: {printable(str(error))}", file=sys.stderr)
        return 2
