"""Install the name flash_attn into an environment, and remove it completely.

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
from flash_attn_compat.installed import EXTENSION, SITE, SITE_2_6, find_real_spec

INSTALLER = "flash-attn-compat"
_STARTUP = "_flash_attn_compat_startup"
# The interpreter runs a .pth line at every start; this one lets transformers on a CPU accept flash_attention_2.
_PTH = f"import {_STARTUP}; {_STARTUP}.wait_for_imports(%s)\n"
# The folder of files to be moved into place, and its subfolder for copies of the files that they replace.
_STAGE, _BEFORE = ".flash_attn_compat-", "before"
_METADATA = frozenset({"INSTALLER", "METADATA", "RECORD", "WHEEL", "top_level.txt"})
_WHEEL = b"Wheel-Version: 1.0\nGenerator: flash-attn-compat\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class InstallError(RuntimeError):
    """The name cannot be installed or removed here; the message says why and what to do."""


def install(
    directory: str | Path | None = None, api: str = "2.8", sdpa: str | None = None, transformers: bool = False,
    flex: str | None = None,
) -> Path:  # fmt: skip
    """Write the distribution into `directory` (this interpreter's site-packages) and return its dist-info.

    api: the interface under the name, "2.6" or "2.8"; see `flash_attn_compat.patch`
    sdpa: "1" or "always": the default of FLASH_ATTN_COMPAT_SDPA in every process of the environment
    transformers: make 1 the default of FLASH_ATTN_COMPAT_TRANSFORMERS there
    flex: "1" or "always": the default of FLASH_ATTN_COMPAT_FLEX there

    Installing again renews the files. They are written aside and then moved into place: a failure restores the files
    from before, and the next run completes or removes the files of a killed process.
    Raises InstallError if there is a real flash-attn, even a broken one, or if the files cannot be written.
    """
    place = _check_place(directory)
    _refuse_if_real(place)
    with _explain_os_errors(place, "install", directory is None):
        place.mkdir(parents=True, exist_ok=True)
        with _lock_directory(place), _make_stage(place) as stage:
            written = _write_into(stage, place, dict(_files(api, sdpa, transformers, flex)), _dist_info_name(api))
            before = _ours_in(place)
            _move_into_place(stage, place, written)
            _remove(place, [path for path in before if path.relative_to(place).as_posix() not in written])
    importlib.invalidate_caches()
    return place / _dist_info_name(api)


def uninstall(directory: str | Path | None = None) -> list[Path]:
    """Remove install()'s files from `directory` (this interpreter's site-packages); return the removed dist-infos.

    Other packages' files stay, even if RECORD names them. Raises InstallError if a file cannot be removed.
    """
    place = _check_place(directory)
    if not place.is_dir():
        return []
    with _explain_os_errors(place, "uninstall", directory is None), _lock_directory(place):
        removed = installed(place)
        _remove(place, _ours_in(place))
        _remove_empty(place, {(place / name).parent for name in _known_names()})  # a killed process may leave these
        _remove_stages(place)
    importlib.invalidate_caches()
    return removed


def installed(directory: str | Path | None = None) -> list[Path]:
    """Return the dist-info directories that install() wrote, in `directory` or anywhere on sys.path."""
    path = sys.path if directory is None else [str(directory)]
    dist_infos = []
    for distribution in importlib.metadata.distributions(name="flash-attn", path=path):
        dist_info = Path(str(distribution.locate_file(""))) / f"flash_attn-{distribution.version}.dist-info"
        if distribution.read_text("INSTALLER") == INSTALLER + "\n" and (dist_info / "RECORD").is_file():
            dist_infos.append(dist_info)
    return list(dict.fromkeys(dist_infos))


def _check_place(directory: str | Path | None) -> Path:
    """Return the directory to install into or to remove from. Raises InstallError for a directory of this package."""
    place = Path(directory or sysconfig.get_path("purelib"))
    if not Path(SITE).is_dir():
        raise InstallError(f"{SITE} is no directory: install flash_attn_compat by pip, not as a zip file on the path")
    if place.resolve() in (Path(SITE), Path(SITE_2_6)):
        raise InstallError(f"{place} is a part of flash_attn_compat itself")
    return place


def _refuse_if_real(place: Path) -> None:
    spec = find_real_spec()
    if spec is not None and not spec.submodule_search_locations:
        raise InstallError(
            f"{spec.origin} answers to the name flash_attn and is a single file, not the package: rename or move it"
        )
    real = installed_package.find_real()
    if real is not None and real.usable:
        raise InstallError(
            f"flash-attn {real.version or ''} in {real.location} works on this machine, so nothing is installed"
        )
    if real is not None:
        raise InstallError(
            f"flash-attn {real.version or ''} in {real.location} cannot serve here ({real.unusable_because}). "
            "Run pip uninstall flash-attn and then this again; or keep it and call flash_attn_compat.patch(), "
            "which makes it work"
        )
    package = place / "flash_attn" / "__init__.py"  # a directory without this file may be FlashAttention 4: it can stay
    if package.exists() and not _has_mark(package):
        raise InstallError(f"{package} exists and is not ours: move it away first")


@contextlib.contextmanager
def _explain_os_errors(place: Path, command: str, is_default: bool) -> Iterator[None]:
    """Turn OSErrors into InstallErrors that say what to do."""
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
def _lock_directory(place: Path) -> Iterator[None]:
    """Hold a lock on the directory that other installs and uninstalls wait for, if the system has such locks.

    Raises OSError if the directory cannot be opened.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(place, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _make_stage(place: Path) -> Iterator[Path]:
    """Give a temporary directory on the file system of `place`; remove the ones that killed processes left."""
    _remove_stages(place)
    stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=place))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _remove_stages(place: Path) -> None:
    for stage in place.glob(f"{_STAGE}*"):
        if os.name != "nt":  # Windows has no lock on directories, so another process may be using it
            shutil.rmtree(stage, ignore_errors=True)


def _write_into(stage: Path, place: Path, files: dict[str, bytes], dist_info: str) -> list[str]:
    """Write the distribution into `stage`, and copies of the files that it replaces in `place`.

    Returns the files' names in the order of moving.
    """
    for name, content in files.items():
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    compiled = [_compile(stage, place, name) for name in files if name.endswith(".py")]
    names = [*files, *filter(None, compiled)]
    record = f"{dist_info}/RECORD"
    (stage / record).write_text(_record(stage, names, record), encoding="utf-8")
    for name in names:
        if (place / name).is_file():
            (stage / _BEFORE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(place / name, stage / _BEFORE / name)
    return [*names, record]


def _move_into_place(stage: Path, place: Path, names: list[str]) -> None:
    """Move all files; after a failure, restore the files from before."""
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
    """Return the files that install() wrote, INSTALLER last; compiled files are left out.

    A file counts by its content, since RECORD may name another package's file.
    """
    names = _known_names()
    for dist_info in installed(place):
        with open(dist_info / "RECORD", newline="", encoding="utf-8", errors="replace") as record:
            names |= {row[0] for row in csv.reader(record) if row}
    # INSTALLER marks the other files as ours. It is removed last, so that a killed process leaves no unmarked file.
    names_in_order = sorted(names, key=lambda name: (name.endswith("INSTALLER"), name))
    return [place / name for name in names_in_order if _is_ours(place, name)]


def _known_names() -> set[str]:
    """Return the names of all files that install() may write, except compiled ones."""
    records = {f"{_dist_info_name(api)}/RECORD" for api in settings.APIS}
    return records | {name for api in settings.APIS for name, _ in _files(api)}


def _is_ours(place: Path, name: str) -> bool:
    """Whether install() wrote this file below `place`."""
    relative = PurePosixPath(name)
    path = place / name
    if relative.is_absolute() or ".." in relative.parts:
        return False
    if not path.is_file() or not path.parent.resolve().is_relative_to(place.resolve()):
        return False
    if relative.parent.name.startswith("flash_attn-") and len(relative.parts) == 2:
        return relative.name in _METADATA and _read_text(path.parent / "INSTALLER") == INSTALLER + "\n"
    return relative.suffix in (".py", ".pth") and _has_mark(path)


def _has_mark(path: Path) -> bool:
    return _STARTUP in _read_text(path) or path.name == f"{_STARTUP}.py"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _files(
    api: str, sdpa: str | None = None, transformers: bool = False, flex: str | None = None
) -> Iterator[tuple[str, bytes]]:
    source = Path(SITE)
    for path in sorted((source / "flash_attn").rglob("*.py")):
        content = path.read_bytes().replace(b"_INSTALLED_API = None", f'_INSTALLED_API = "{api}"'.encode())
        yield path.relative_to(source).as_posix(), content
    for name in (f"{EXTENSION}.py", f"{_STARTUP}.py"):
        yield name, (source / name).read_bytes()
    arguments = [*([repr(sdpa)] if sdpa else []), *(["transformers=True"] if transformers else [])]
    arguments += [f"flex={flex!r}"] if flex else []
    yield f"{_STARTUP}.pth", (_PTH % ", ".join(arguments)).encode()
    metadata = Path(SITE_2_6 if api == "2.6" else SITE) / _dist_info_name(api)
    for name in ("INSTALLER", "top_level.txt"):
        yield f"{metadata.name}/{name}", (metadata / name).read_bytes()
    yield f"{metadata.name}/METADATA", (metadata / "METADATA").read_bytes() + _requirement()
    yield f"{metadata.name}/WHEEL", _WHEEL  # uv reports a distribution without WHEEL as broken


def _requirement() -> bytes:
    """Return a requirement that makes pip warn if flash-attn-compat alone is removed; empty in a checkout."""
    try:
        importlib.metadata.distribution(INSTALLER)
    except importlib.metadata.PackageNotFoundError:
        return b""
    return f"Requires-Dist: {INSTALLER}\n".encode()


def _dist_info_name(api: str) -> str:
    return f"flash_attn-{settings.API_VERSIONS[api]}.dist-info"


def _compile(stage: Path, place: Path, name: str) -> str | None:
    """Compile a module as the interpreter would; return the compiled file's name, or None if it failed."""
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
    """Remove files, their compiled files, and the folders that are then empty."""
    folders = set()
    for path in files:
        # Each Python version and level of optimisation has a compiled file of its own.
        compiled = path.parent.glob(f"__pycache__/{path.stem}.*.pyc") if path.suffix == ".py" else ()
        for victim in [*compiled, path]:
            victim.unlink(missing_ok=True)
            folders.add(victim.parent)
    _remove_empty(place, folders)


def _remove_empty(place: Path, folders: set[Path]) -> None:
    """Remove these folders below `place`, their __pycache__ and their parents where they are empty. Deepest first."""
    folders = folders | {parent for folder in folders for parent in folder.parents if parent.is_relative_to(place)}
    folders |= {folder / "__pycache__" for folder in folders}
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        if folder != place and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
