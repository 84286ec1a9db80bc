"""The command flash-attn-compat: parses arguments, calls the module that does the work, and returns exit codes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flash_attn_compat import __version__, progress, settings
from flash_attn_compat.dropin import install as installation
from flash_attn_compat.dropin import patch
from flash_attn_compat.dropin.patch import SdpaRequest, warn_of_xformers
from flash_attn_compat.output_path import output_path

# The options of the command `run`, each with the value that it gives to patch()'s argument sdpa, flex or api.
_SDPA: dict[str, SdpaRequest] = {"--sdpa": True, "--sdpa=always": "always"}
_FLEX: dict[str, SdpaRequest] = {"--flex": True, "--flex=always": "always"}
_API = {f"--api={api}": api for api in settings.APIS}
# The time that one core of a slow processor takes to compile a kernel. `compile` prints an upper bound from it.
_SECONDS_PER_KERNEL = 2.5
# Dependencies that are missing if pip installed this package alone (--no-deps). doctor, tune and compile need both.
_REQUIRED = "torch", "einops"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 refused or failed, 2 wrong usage."""
    action = _parse_action(list(sys.argv[1:] if arguments is None else arguments))
    try:
        settings.check()
    except ValueError as error:
        return _report_error(error, 2)
    try:
        return action()
    except ModuleNotFoundError as error:
        if error.name not in _REQUIRED:
            raise
        return _report_error(f"{error.name} is not installed: pip install {error.name}", 2)


def _parse_action(arguments: list[str]) -> Callable[[], int]:
    """Return the function that the arguments name. Arguments after run and verify are passed on unparsed."""
    if arguments[:1] == ["verify"]:
        return partial(verify, arguments[1:])
    if arguments[:1] == ["run"]:
        sdpa, api, transformers, flex = _parse_run_options(arguments)
        if len(arguments) > 1 and arguments[1] not in ("-h", "--help"):
            return partial(run, arguments[1:], sdpa, api, transformers, flex)
    options = _parser().parse_args(arguments)
    if options.command == "run":
        _parser().error("run: name a script, or -m and a module")
    return partial(options.action, options)


def _report_error(error: object, code: int = 1) -> int:
    """Print the error on stderr and return the exit code."""
    print(f"flash-attn-compat: {error}", file=sys.stderr)
    return code


def _parse_run_options(arguments: list[str]) -> tuple[SdpaRequest, str | None, bool, SdpaRequest]:
    """Remove run's own options, which precede the script, from ``arguments``.

    Returns (sdpa, api, transformers, flex).
    """
    sdpa: SdpaRequest = False
    flex: SdpaRequest = False
    api, transformers = None, False
    while len(arguments) > 1:
        if arguments[1] == "--api" and len(arguments) > 2:
            arguments[1:3] = [f"--api={arguments[2]}"]
        if arguments[1] in _SDPA:
            sdpa = _SDPA[arguments[1]]
        elif arguments[1] in _FLEX:
            flex = _FLEX[arguments[1]]
        elif arguments[1] == "--transformers":
            transformers = True
        elif arguments[1] in _API:
            api = _API[arguments[1]]
        elif arguments[1].startswith("--api"):
            _parser().error(f"run: --api must be {' or '.join(settings.APIS)}, got {arguments[1][6:]!r}")
        else:
            break
        del arguments[1]
    return sdpa, api, transformers, flex


def run(
    arguments: Sequence[str], sdpa: SdpaRequest = False, api: str | None = None, transformers: bool = False,
    flex: SdpaRequest = False,
) -> NoReturn:  # fmt: skip
    """Replace this process by `python ARGUMENTS...`, in which `import flash_attn` finds this package.

    A fresh interpreter has the same __main__, sys.path, exit code, signals and tracebacks as a direct run.

    sdpa, api, transformers, flex: as in patch()
    """
    patch(api, sdpa=sdpa, transformers=transformers, flex=flex)
    command = [sys.executable, *arguments]
    if os.name == "nt":  # exec on Windows starts a child and returns to the shell at once
        sys.exit(subprocess.call(command))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def verify(arguments: Sequence[str]) -> int:
    """Run `python -m verify` and return its exit code. A wheel has verify in the package, a clone beside it."""
    package = Path(__file__).parent
    name = "flash_attn_compat.verify" if (package / "verify").is_dir() else "verify"
    sys.path.insert(0, str(package.parent))
    program = importlib.import_module(f"{name}.__main__")
    del sys.path[0]
    with contextlib.suppress(FileNotFoundError):  # the current folder was deleted
        # verify imports the user's kernels from this folder. It goes last, so that a torch.py in it hides no library.
        sys.path.append(os.getcwd())
    code: int = program.main(list(arguments))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-attn-compat", description="Run code written for flash_attn on machines that flash-attn refuses."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "install",
        help="let every program of this environment import flash_attn",
        description="Puts flash_attn and its metadata into this environment, so that every program here, notebooks "
        "included, imports this package. Refused if a real flash-attn is installed.",
    )
    command.add_argument("--target", metavar="DIR", help="instead of this interpreter's site-packages")
    command.add_argument(
        "--api", choices=settings.APIS, default="2.8",
        help="the interface to serve: 2.6 is for code written before flash-attn 2.7",
    )  # fmt: skip
    command.add_argument(
        "--sdpa", nargs="?", const="1", choices=("1", "always"), metavar="always",
        help="let this package's kernels compute F.scaled_dot_product_attention too: on GPUs before compute capability "
        "8.0, or with 'always' on every GPU that they run on",
    )  # fmt: skip
    command.add_argument(
        "--transformers", action="store_true", help="let this package compute transformers' flash_attention_2"
    )
    command.add_argument(
        "--flex", nargs="?", const="1", choices=("1", "always"), metavar="always",
        help="let this package's kernels compute torch.nn.attention.flex_attention: on GPUs before compute capability "
        "8.0, or with 'always' on every GPU that they run on",
    )  # fmt: skip
    command.set_defaults(action=_install)

    command = commands.add_parser(
        "uninstall",
        help="remove the files that install wrote",
        description="Removes the files that install wrote into this environment and no others. This package itself "
        "stays.",
    )
    command.add_argument("--target", metavar="DIR", help="the directory given to install")
    command.set_defaults(action=_uninstall)

    command = commands.add_parser(
        "run",
        help="run a script or module that finds flash_attn",
        description="Runs a script or module as python itself would. It, and the processes that it starts, import "
        "flash_attn from this package. Nothing is installed.",
        usage="%(prog)s [--api {2.6,2.8}] [--sdpa[=always]] [--flex[=always]] [--transformers] SCRIPT "
        "[ARGUMENT ...] | -m MODULE [ARGUMENT ...]",
        epilog="--api 2.6: the interface for code written before flash-attn 2.7. "
        "--sdpa: this package's kernels compute F.scaled_dot_product_attention too, on GPUs before compute "
        "capability 8.0; --sdpa=always: on every GPU that they run on. "
        "--flex, --flex=always: torch.nn.attention.flex_attention likewise. "
        "--transformers: this package computes transformers' flash_attention_2.",
    )
    command.add_argument("rest", nargs=argparse.REMAINDER, metavar="SCRIPT")

    command = commands.add_parser(
        "doctor",
        help="describe this machine, explain typical calls, and check the answers",
        description="Examines this machine for some seconds and changes nothing. Kernels run in child processes, so "
        "that a kernel that breaks one is named. Exit code 0: every backend that can run computes right, and each "
        "typical call finds one; 1: otherwise; 2: an environment variable has a wrong value.",
    )
    command.add_argument("--json", action="store_true", help="the report as one JSON object")
    command.add_argument(
        "--again", action="store_true",
        help="forget which kernels ended a process here, and try them again",
    )  # fmt: skip
    command.set_defaults(action=_doctor)

    commands.add_parser(
        "verify", add_help=False, help="check, locate, compare and time attention kernels, yours or this package's"
    )

    command = commands.add_parser(
        "tune",
        help="find the fastest tiles and backends on this GPU, for all later calls",
        description="Times the tiles of this package's CUDA kernels and the other backends at usual calls, for "
        "some minutes at most. Stores the result beside the compiled kernels. Let nothing else use the GPU meanwhile.",
    )
    _add_sizes(command, "64 and 128", "bfloat16 where the GPU computes it, else float16")
    command.add_argument(
        "--seqlen", type=_integer(128, 2**20), default=2048, metavar="N", help="rows and keys of a sequence (2048)"
    )
    command.add_argument("--json", type=output_path, metavar="FILE", help="write the result, to send it")
    command.set_defaults(action=_tune)

    command = commands.add_parser(
        "compile",
        help="compile this package's CUDA kernels beforehand, with or without a GPU",
        description="Compiles kernels into the cache folder: some 100 for each ARCH, those of a 7B model trained by "
        "LoRA, of packed BERT and of a diffusion step. --all, and each option below it, ask for more: up to 1,200. "
        "Each takes one processor a second or two. Programs here will use the same NVRTC.",
    )
    command.add_argument(
        "--for", dest="architectures", action="append", metavar="ARCH", required=True,
        help="sm_75, sm_80, sm_90, ...: the compute capability of the GPUs; repeatable",
    )  # fmt: skip
    command.add_argument("--into", metavar="DIR", help=f"the folder that {settings.CACHE} will name there")
    command.add_argument("--all", action="store_true", help="the kernels of most models, with at most one feature each")
    _add_sizes(command, "those of most models", "both")
    command.add_argument(
        "--sdpa",
        action="store_true",
        help=f"also the kernels for F.scaled_dot_product_attention with masks; {settings.SDPA}=1 does the same",
    )
    command.set_defaults(action=_compile)
    return parser


def _add_sizes(command: argparse.ArgumentParser, head_dims: str, dtypes: str) -> None:
    """Add --head-dim and --dtype to a command. head_dims, dtypes: their defaults, in the words of the help text"""
    repeatable: dict[str, Any] = {"action": "append", "default": []}
    command.add_argument(
        "--head-dim", type=_integer(1, 512), metavar="N", help=f"default: {head_dims}; repeatable", **repeatable
    )
    command.add_argument(
        "--dtype", choices=("float16", "bfloat16"), help=f"default: {dtypes}; repeatable", **repeatable
    )


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} to {most}, got {text!r}")
        return int(text)

    return parse


def _install(options: argparse.Namespace) -> int:
    try:
        dist_info = installation.install(options.target, options.api, options.sdpa, options.transformers, options.flex)
    except installation.InstallError as error:
        return _report_error(error)
    warn_of_xformers(options.api)
    command = ["flash-attn-compat", "uninstall", *(["--target", options.target] if options.target else [])]
    print(f"installed {dist_info.name} in {dist_info.parent}; {shlex.join(command)} removes it")
    return 0


def _uninstall(options: argparse.Namespace) -> int:
    try:
        removed = installation.uninstall(options.target)
    except installation.InstallError as error:
        return _report_error(error)
    for dist_info in removed:
        print(f"removed {dist_info.name} from {dist_info.parent}")
    if not removed:
        print("nothing to remove: flash-attn-compat install was not run here")
    for dist_info in [] if options.target else installation.installed():
        print(f"another one stays: flash-attn-compat uninstall --target {shlex.quote(str(dist_info.parent))}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from flash_attn_compat import doctor
    from flash_attn_compat.backends.fused.judging import faults

    if options.again:
        faults.remove_marks()

    def tell(machine: doctor.Machine) -> None:
        if not options.json:
            print(doctor.format_machine(machine), flush=True)

    try:
        report = doctor.examine(tell)
    except ValueError as error:  # the setting BACKEND names no backend: settings.check() has no list of them
        return _report_error(error, 2)
    print(doctor.to_json(report) if options.json else f"\n{doctor.format_rest(report)}")
    return 0 if report.healthy else 1


def _tune(options: argparse.Namespace) -> int:
    from flash_attn_compat import tune
    from flash_attn_compat.backends.fused.building import kernel_files
    from flash_attn_compat.backends.fused.tuning import tuned

    try:
        tuning = tune.plan_tuning(options.head_dim, options.dtype, options.seqlen)
    except tune.CannotTune as error:
        return _report_error(error)
    write_error = kernel_files.write_error()
    if write_error and not options.json:
        return _report_error(write_error)
    tuning.run_all()
    is_stored = bool(tuning.card.times) and tuned.store_card(tuning.card)  # first, so that no error below loses it
    print(*tuning.summary(), sep="\n")
    for failure in tuning.failures:
        _report_error(f"could not time {failure}")
    code = _write(options.json, tuned.to_row(tuning.card)) if options.json else 0
    if not tuning.card.times:
        return _report_error("nothing could be compared")
    if not is_stored:
        return _report_error("the result could not be written, so later calls do not use it")
    return code


def _write(path: Path, line: str) -> int:
    """Write a file of one line and return the exit code."""
    try:
        path.write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        return _report_error(f"cannot write {path}: {error.strerror}")
    print(f"wrote {path}")
    return 0


def _compile(options: argparse.Namespace) -> int:
    from flash_attn_compat.backends.fused import clearing
    from flash_attn_compat.backends.fused.building import aot, kernel_files
    from flash_attn_compat.backends.fused.building.nvrtc import KernelError
    from flash_attn_compat.backends.fused.choosing import enumeration

    if options.into:
        os.environ[settings.CACHE] = options.into
    try:
        numbers = {architecture: aot.parse_architecture(architecture) for architecture in options.architectures}
    except KernelError as error:
        return _report_error(error, 2)
    if write_error := kernel_files.write_error():
        return _report_error(write_error)
    masks = options.sdpa or settings.value_of(settings.SDPA) in ("1", "always")
    is_more = options.all or options.head_dim or options.dtype or masks
    jobs = []
    for architecture, number in numbers.items():
        more = aot.common_kinds(number, options.head_dim, options.dtype, masks)
        kinds = more if is_more else aot.usual_kinds(number)
        jobs += [(variant, architecture) for variant in enumeration.made_for(kinds)]
        jobs += [(clearing.VARIANT, architecture)] * (number >= 80)  # torch_flash launches this kernel
    minutes = -(-len(jobs) * _SECONDS_PER_KERNEL // (60 * (os.cpu_count() or 1)))
    about = f"at most {minutes:.0f} minute{'s' * (minutes > 1)} on {os.cpu_count()} processors"
    print(f"{len(jobs)} kernels for {', '.join(numbers)}: {about}", file=sys.stderr, flush=True)
    compiled, errors = aot.compile_all(jobs, lambda jobs: progress.show_progress(jobs, lambda job: ""))
    were_there = len(jobs) - compiled - len(errors)
    print(f"{compiled} kernels compiled, {were_there} were there: {kernel_files.describe_folder()}")
    for message in dict.fromkeys(errors):
        _report_error(message)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
