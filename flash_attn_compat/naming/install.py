"""Install the name flash_attn into an environment, and remove it without a trace.

Writes an ordinary distribution flash-attn (package, metadata, RECORD) that pip lists, accepts and can uninstall.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import importlib.metadata
import io
import py_compile
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from flash_attn_compat import settings
from flash_attn_compat.installed import EXTENSION, SITE, SITE_2_6
from flash_attn_compat.naming import real

INSTALLER = "flash-attn-compat"
_STARTUP = "_flash_attn_compat_startup"
# A .pth line is run at every start of the interpreter; it lets transformers on a CPU accept flash_attention_2.
_PTH = f"import {_STARTUP}; {_STARTUP}.wait_for_imports(%s)\n"


class InstallError(RuntimeError):
    """The name cannot be installed here; the message says why and what to do."""


def install(directory: str | Path | None = None, api: str = "2.8", sdpa: str | None = None) -> Path:
    """Write the distribution into `directory` (this interpreter's site-packages) and return its dist-info.

    api: the interface that stands under the name, "2.6" or "2.8"; see `flash_attn_compat.patch`.
    sdpa: "1" or "always", what FLASH_ATTN_COMPAT_SDPA is in every process of the environment that does not set it

    Refuses with InstallError where a real flash-attn is found, a broken one included: its files are not ours to
    overwrite. Installing again renews the files.
    """
    directory = Path(directory or sysconfig.get_path("purelib"))
    _refuse_a_real_one(directory)
    uninstall(directory)
    files = dict(_files(api, sdpa))
    written: list[Path] = []
    try:
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            written.append(path)
        compiled = [_compile(path) for path in written if path.suffix == ".py"]
        record = directory / _dist_info_name(api) / "RECORD"
        record.write_text(_record(directory, [*written, *filter(None, compiled)], record), encoding="utf-8")
    except OSError as error:
        _remove(directory, written)
        raise InstallError(f"cannot write into {directory}: {error}") from error
    importlib.invalidate_caches()
    return record.parent


def uninstall(directory: str | Path | None = None) -> list[Path]:
    """Remove what install() wrote, from `directory` or wherever on sys.path it is; returns the removed dist-infos."""
    removed = []
    for dist_info in installed(directory):
        with open(dist_info / "RECORD", newline="", encoding="utf-8") as record:
            files = [dist_info.parent / row[0] for row in csv.reader(record) if row]
        _remove(dist_info.parent, files)
        removed.append(dist_info)
    importlib.invalidate_caches()
    return removed


def installed(directory: str | Path | None = None) -> list[Path]:
    """The dist-info directories that install() wrote, in `directory` or on sys.path."""
    path = sys.path if directory is None else [str(directory)]
    found = []
    for distribution in importlib.metadata.distributions(name="flash-attn", path=path):
        dist_info = Path(str(distribution.locate_file(""))) / f"flash_attn-{distribution.version}.dist-info"
        if distribution.read_text("INSTALLER") == INSTALLER + "\n" and (dist_info / "RECORD").is_file():
            found.append(dist_info)
    return list(dict.fromkeys(found))


def _refuse_a_real_one(directory: Path) -> None:
    found = real.find_real()
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
    package = directory / "flash_attn" / "__init__.py"  # a directory without may be FlashAttention 4, which can stay
    if package.exists() and not installed(directory):
        raise InstallError(f"{package} exists and is not ours: move it away first")


def _files(api: str, sdpa: str | None) -> Iterator[tuple[str, bytes]]:
    site = Path(SITE)
    for path in sorted((site / "flash_attn").rglob("*.py")):
        content = path.read_bytes().replace(b"_INSTALLED_API = None", f'_INSTALLED_API = "{api}"'.encode())
        yield path.relative_to(site).as_posix(), content
    for name in (f"{EXTENSION}.py", f"{_STARTUP}.py"):
        yield name, (site / name).read_bytes()
    yield f"{_STARTUP}.pth", (_PTH % (repr(sdpa) if sdpa else "")).encode()
    metadata = Path(SITE_2_6 if api == "2.6" else SITE) / _dist_info_name(api)
    for name in ("INSTALLER", "top_level.txt"):
        yield f"{metadata.name}/{name}", (metadata / name).read_bytes()
    yield f"{metadata.name}/METADATA", (metadata / "METADATA").read_bytes() + _requirement()


def _requirement() -> bytes:
    """A requirement by which pip warns whoever removes flash-attn-compat alone; none when run from a checkout."""
    try:
        importlib.metadata.distribution(INSTALLER)
    except importlib.metadata.PackageNotFoundError:
        return b""
    return f"Requires-Dist: {INSTALLER}\n".encode()


def _dist_info_name(api: str) -> str:
    return f"flash_attn-{settings.API_VERSIONS[api]}.dist-info"


def _compile(path: Path) -> Path | None:
    try:
        return Path(str(py_compile.compile(str(path), doraise=True)))
    except (OSError, py_compile.PyCompileError):
        return None


def _record(directory: Path, files: list[Path], record: Path) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for path in files:
        name = path.relative_to(directory).as_posix()
        if path.suffix == ".pyc":
            writer.writerow([name, "", ""])
        else:
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            writer.writerow([name, f"sha256={digest}", path.stat().st_size])
    writer.writerow([record.relative_to(directory).as_posix(), "", ""])
    return text.getvalue()


def _remove(directory: Path, files: list[Path]) -> None:
    folders = set()
    for path in files:
        # By every interpreter and level of optimisation that imported it.
        compiled = path.parent.glob(f"__pycache__/{path.stem}.*.pyc") if path.suffix == ".py" else ()
        for victim in [path, *compiled]:
            victim.unlink(missing_ok=True)
            folders.add(victim.parent)
    # Deepest first; site-packages itself and its __pycache__ stay unless empty of everybody's files.
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        if folder not in (directory, directory.parent) and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
