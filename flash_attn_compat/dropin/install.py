"""Install the name flash_attn into an environment, and remove it without a trace.

Writes an ordinary distribution flash-attn (package, metadata, RECORD) that pip lists, accepts and can uninstall.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import importlib
import importlib.metadata
import io
import os
import py_compile
import shlex
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from flash_attn_compat import settings
from flash_attn_compat.dropin import installed_package
from flash_attn_compat.installed import EXTENSION, SITE, SITE_2_6, real_spec

INSTALLER = "flash-attn-compat"
_STARTUP = "_flash_attn_compat_startup"
# A .pth line is run at every start of the interpreter; it lets transformers on a CPU accept flash_attention_2.
_PTH = f"import {_STARTUP}; {_STARTUP}.wait_for_imports(%s)\n"
# Where files are before they are moved into place, and those that are there already.
_STAGE, _BEFORE = ".flash_attn_compat-", "before"
_METADATA = frozenset({"INSTALLER", "METADATA", "RECORD", "WHEEL", "top_level.txt"})
_WHEEL = b"Wheel-Version: 1.0\nGenerator: flash-attn-compat\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class InstallError(RuntimeError):
    """The name cannot be installed here; the message says why and what to do."""


def install(directory: str | Path | None = None, api: str = "2.8", sdpa: str | None = None) -> Path:
    """Write the distribution into `directory` (this interpreter's site-packages) and return its dist-info.

    api: the interface that stands under the name, "2.6" or "2.8"; see `flash_attn_compat.patch`.
    sdpa: "1" or "always", what FLASH_ATTN_COMPAT_SDPA is in every process of the environment that does not set it

    Refuses with InstallError where a real flash-attn is found, a broken one included: its files are not ours to
    overwrite. Installing again renews the files. All files are written aside and then moved into place, so a failure
    leaves what was there before, and what a killed process leaves is completed or removed by the next one.
    """
    place = _place(directory)
    _refuse_a_real_one(place)
    with _told(place, "install", directory is None):
        place.mkdir(parents=True, exist_ok=True)
        with _alone_in(place), _stage_in(place) as stage:
            written = _write_into(stage, place, dict(_files(api, sdpa)), _dist_info_name(api))
            before = _ours_in(place)
            _move_into_place(stage, place, written)
            _remove(place, [path for path in before if path.relative_to(place).as_posix() not in written])
    importlib.invalidate_caches()
    return place / _dist_info_name(api)


def uninstall(directory: str | Path | None = None) -> list[Path]:
    """Remove what install() wrote, from `directory` (this interpreter's site-packages); returns the removed dist-infos.

    Files of others stay, whatever RECORD says of them. Raises InstallError where files cannot be removed.
    """
    place = _place(directory)
    if not place.is_dir():
        return []
    with _told(place, "uninstall", directory is None), _alone_in(place):
        removed = installed(place)
        _remove(place, _ours_in(place))
        _remove_empty(place, {(place / name).parent for name in _known_names()})  # of a process that was killed
        _remove_stages(place)
    importlib.invalidate_caches()
    return removed


def installed(directory: str | Path | None = None) -> list[Path]:
    """The dist-info directories that install() wrote, in `directory` or anywhere on sys.path."""
    path = sys.path if directory is None else [str(directory)]
    found = []
    for distribution in importlib.metadata.distributions(name="flash-attn", path=path):
        dist_info = Path(str(distribution.locate_file(""))) / f"flash_attn-{distribution.version}.dist-info"
        if distribution.read_text("INSTALLER") == INSTALLER + "\n" and (dist_info / "RECORD").is_file():
            found.append(dist_info)
    return list(dict.fromkeys(found))


def _place(directory: str | Path | None) -> Path:
    """The directory to write into, or to remove from; never one of this package's own."""
    place = Path(directory or sysconfig.get_path("purelib"))
    if not Path(SITE).is_dir():
        raise InstallError(f"{SITE} is no directory: install flash_attn_compat by pip, not as a zip file on the path")
    if place.resolve() in (Path(SITE), Path(SITE_2_6)):
        raise InstallError(f"{place} is a part of flash_attn_compat itself")
    return place


def _refuse_a_real_one(place: Path) -> None:
    spec = real_spec()
    if spec is not None and not spec.submodule_search_locations:
        raise InstallError(
            f"{spec.origin} answers to the name flash_attn and is a single file, not the package: rename or move it"
        )
    found = installed_package.find_real()
    if found is not None and found.usable:
        raise InstallError(
            f"flash-attn {found.version or ''} in {found.location} works on this machine, so nothing is installed"
        )
    if found is not None:
        raise InstallError(
            f"flash-attn {found.version or ''} in {found.location} cannot serve here ({found.unusable_because}). "
            "Run pip uninstall flash-attn and then this again; or keep it and call flash_attn_compat.patch(), "
            "which makes it work"
        )
    package = place / "flash_attn" / "__init__.py"  # a directory without may be FlashAttention 4, which can stay
    if package.exists() and not _has_mark(package):
        raise InstallError(f"{package} exists and is not ours: move it away first")


@contextlib.contextmanager
def _told(place: Path, command: str, is_default: bool) -> Iterator[None]:
    """Errors of the file system as InstallError, with what to do."""
    try:
        yield
    except OSError as error:
        hint = ""
        if isinstance(error, PermissionError) and is_default and site.ENABLE_USER_SITE:
            target = shlex.quote(site.getusersitepackages())
            hint = f". For your own user alone: flash-attn-compat {command} --target {target}"
        failed = "write into" if command == "install" else "remove from"
        raise InstallError(f"cannot {failed} {place}: {error}{hint}") from error


@contextlib.contextmanager
def _alone_in(place: Path) -> Iterator[None]:
    """Wait until no other install or uninstall works on the directory, where the system lets directories be locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(place, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _stage_in(place: Path) -> Iterator[Path]:
    """A directory beside the files to come, on their file system; those of killed processes go."""
    _remove_stages(place)
    stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=place))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _remove_stages(place: Path) -> None:
    for left in place.glob(f"{_STAGE}*"):
        if os.name != "nt":  # where another process may be using it
            shutil.rmtree(left, ignore_errors=True)


def _write_into(stage: Path, place: Path, files: dict[str, bytes], dist_info: str) -> list[str]:
    """The distribution, as it will lie in `place`; returns the files' names in the order in which they go there."""
    for name, content in files.items():
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    compiled = [_compile(stage, place, name) for name in files if name.endswith(".py")]
    names = [*files, *filter(None, compiled)]
    record = f"{dist_info}/RECORD"
    (stage / record).write_text(_record(stage, names, record), encoding="utf-8")
    for name in names:  # after all that is ours alone: what was there before, in case a move fails
        if (place / name).is_file():
            (stage / _BEFORE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(place / name, stage / _BEFORE / name)
    return [*names, record]


def _move_into_place(stage: Path, place: Path, names: list[str]) -> None:
    """All files, or none: after a failure those of before are back."""
    moved: list[str] = []
    try:
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / name, place / name)
            moved.append(name)
    except OSError:
        for name in moved:
            if (stage / _BEFORE / name).is_file():
                os.replace(stage / _BEFORE / name, place / name)
            else:
                (place / name).unlink()
        _remove_empty(place, {(place / name).parent for name in names})
        raise


def _ours_in(place: Path) -> list[Path]:
    """The files of a directory that install() wrote: by what they hold, so that no RECORD can name another's file."""
    names = _known_names()
    for dist_info in installed(place):
        with open(dist_info / "RECORD", newline="", encoding="utf-8", errors="replace") as record:
            names |= {row[0] for row in csv.reader(record) if row}
    # Last what tells that the rest is ours, in case the process is killed before.
    names_in_order = sorted(names, key=lambda name: (name.endswith("INSTALLER"), name))
    return [place / name for name in names_in_order if _is_ours(place, name)]


def _known_names() -> set[str]:
    """Of all files that install() may write, but for compiled ones."""
    records = {f"{_dist_info_name(api)}/RECORD" for api in settings.APIS}
    return records | {name for api in settings.APIS for name, _ in _files(api, None)}


def _is_ours(place: Path, name: str) -> bool:
    """Whether install() wrote this file below `place`."""
    relative = PurePosixPath(name)
    path = place / name
    if relative.is_absolute() or ".." in relative.parts:
        return False
    if not path.is_file() or not path.parent.resolve().is_relative_to(place.resolve()):
        return False
    if relative.parent.name.startswith("flash_attn-") and len(relative.parts) == 2:
        return relative.name in _METADATA and _reads(path.parent / "INSTALLER") == INSTALLER + "\n"
    return relative.suffix in (".py", ".pth") and _has_mark(path)


def _has_mark(path: Path) -> bool:
    return _STARTUP in _reads(path) or path.name == f"{_STARTUP}.py"


def _reads(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _files(api: str, sdpa: str | None) -> Iterator[tuple[str, bytes]]:
    source = Path(SITE)
    for path in sorted((source / "flash_attn").rglob("*.py")):
        content = path.read_bytes().replace(b"_INSTALLED_API = None", f'_INSTALLED_API = "{api}"'.encode())
        yield path.relative_to(source).as_posix(), content
    for name in (f"{EXTENSION}.py", f"{_STARTUP}.py"):
        yield name, (source / name).read_bytes()
    yield f"{_STARTUP}.pth", (_PTH % (repr(sdpa) if sdpa else "")).encode()
    metadata = Path(SITE_2_6 if api == "2.6" else SITE) / _dist_info_name(api)
    for name in ("INSTALLER", "top_level.txt"):
        yield f"{metadata.name}/{name}", (metadata / name).read_bytes()
    yield f"{metadata.name}/METADATA", (metadata / "METADATA").read_bytes() + _requirement()
    yield f"{metadata.name}/WHEEL", _WHEEL  # without which uv calls a distribution broken


def _requirement() -> bytes:
    """A requirement by which pip warns whoever removes flash-attn-compat alone; none when run from a checkout."""
    try:
        importlib.metadata.distribution(INSTALLER)
    except importlib.metadata.PackageNotFoundError:
        return b""
    return f"Requires-Dist: {INSTALLER}\n".encode()


def _dist_info_name(api: str) -> str:
    return f"flash_attn-{settings.API_VERSIONS[api]}.dist-info"


def _compile(stage: Path, place: Path, name: str) -> str | None:
    """Compile a module beforehand, as the interpreter would; returns the name of the result, None for none."""
    path = PurePosixPath(name)
    compiled = (path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc").as_posix()
    try:
        py_compile.compile(str(stage / name), str(stage / compiled), str(place / name), doraise=True)
    except (OSError, py_compile.PyCompileError):
        return None
    return compiled


def _record(stage: Path, names: list[str], record: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name in names:
        content = (stage / name).read_bytes()
        if name.endswith(".pyc"):
            writer.writerow([name, "", ""])
        else:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            writer.writerow([name, f"sha256={digest}", len(content)])
    writer.writerow([record, "", ""])
    return text.getvalue()


def _remove(place: Path, files: list[Path]) -> None:
    """Files of ours, what was compiled of them, and folders that are then empty."""
    folders = set()
    for path in files:
        # By every interpreter and level of optimisation that imported it.
        compiled = path.parent.glob(f"__pycache__/{path.stem}.*.pyc") if path.suffix == ".py" else ()
        for victim in [*compiled, path]:
            victim.unlink(missing_ok=True)
            folders.add(victim.parent)
    _remove_empty(place, folders)


def _remove_empty(place: Path, folders: set[Path]) -> None:
    """Folders below `place`, what was compiled in them and their parents included. Deepest first."""
    folders = folders | {parent for folder in folders for parent in folder.parents if parent.is_relative_to(place)}
    folders |= {folder / "__pycache__" for folder in folders}
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        if folder != place and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
