"""What a release says of itself, from CHANGELOG.md; refused where tag, versions, changelog or address do not fit.

python .ci/release_notes.py v0.1.0 > notes.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "example.org"


def against(tag: str, root: Path) -> Iterator[str]:
    """Why this tag cannot be released from these files."""
    version = tag.removeprefix("v")
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        yield f"the tag {tag} is not v and a version: v1.2.3, v1.2.3rc1"
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    module = (root / "flash_attn_compat/__init__.py").read_text(encoding="utf-8")
    for name, found in (
        ("pyproject.toml", re.search(r'^version = "(.+)"$', project, re.MULTILINE)),
        ("flash_attn_compat/__init__.py", re.search(r'^__version__ = "(.+)"$', module, re.MULTILINE)),
    ):
        if found is None or found[1] != version:
            yield f"{name} has version {found[1] if found else 'nowhere'}, the tag is {tag}"
    if PLACEHOLDER in project:
        yield f"pyproject.toml has the placeholder {PLACEHOLDER} for the repository's address"
    newest = re.search(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if newest is None or not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", newest[1]):
        yield f"CHANGELOG.md begins with '## {newest[1] if newest else ''}', not with '## {version} (YYYY-MM-DD)'"


def notes(root: Path) -> str:
    """The newest section of the changelog, without its heading."""
    _, _, text = (root / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")
    return text.partition("\n## ")[0].partition("\n")[2].strip() + "\n"


def main() -> None:
    reasons = list(against(sys.argv[1], ROOT))
    if reasons:
        sys.exit("\n".join(reasons))
    print(notes(ROOT), end="")


if __name__ == "__main__":
    main()
