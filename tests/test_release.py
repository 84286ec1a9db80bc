"""A release is made of files that agree: the tag, the versions, the changelog, the repository's address."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "pyproject.toml": 'version = "1.2.3"\nRepository = "https://somewhere/repository"\n',
    "flash_attn_compat/__init__.py": '__version__ = "1.2.3"\n',
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-11-23)\n\n- New.\n\nMore.\n\n## 1.2.2 (2026-01-01)\n\n- Old.\n",
}


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / ".ci/release_notes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_agrees_is_released_with_the_newest_section_of_the_changelog(release: ModuleType, root: Path) -> None:
    assert list(release.against("v1.2.3", root)) == []
    assert release.notes(root) == "- New.\n\nMore.\n"


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("pyproject.toml", "1.2.3", "1.2.4", "pyproject.toml has version 1.2.4, the tag is v1.2.3"),
        ("flash_attn_compat/__init__.py", "1.2.3", "1.2.2", "__init__.py has version 1.2.2"),
        ("pyproject.toml", "somewhere", "example.org", "the placeholder example.org"),
        ("CHANGELOG.md", "1.2.3 (2026-11-23)", "Unreleased", "begins with '## Unreleased'"),
        ("CHANGELOG.md", "1.2.3 (2026-11-23)", "1.2.3", "not with '## 1.2.3 (YYYY-MM-DD)'"),
    ],
)
def test_what_does_not_agree_is_refused_by_its_name(
    name: str, old: str, new: str, said: str, release: ModuleType, root: Path
) -> None:
    (root / name).write_text(FILES[name].replace(old, new))
    (reason,) = release.against("v1.2.3", root)
    assert said in reason


def test_a_tag_that_is_no_version_is_refused(release: ModuleType, root: Path) -> None:
    assert "v1.2.3rc1" in next(release.against("1.2.3", root))


def test_today_only_what_a_release_changes_is_missing(release: ModuleType) -> None:
    """Both versions are the same, and say what the next release will be."""
    import flash_attn_compat

    reasons = list(release.against(f"v{flash_attn_compat.__version__}", ROOT))
    assert not any("has version" in reason for reason in reasons), reasons
