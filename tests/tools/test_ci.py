"""CI runs with empty caches, and releases only if tag, versions, changelog and address agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.forms.support import load_file

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "pyproject.toml": 'version = "1.2.3"\nRepository = "https://somewhere/repository"\n',
    "flash_attn_compat/__init__.py": '__version__ = "1.2.3"\n',
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-11-23)\n\n- New.\n\nMore.\n\n## 1.2.2 (2026-01-01)\n\n- Old.\n",
}


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_file(ROOT / ".ci/release_notes.py")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_consistent_release_has_the_newest_section_of_the_changelog(release: ModuleType, root: Path) -> None:
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
def test_an_inconsistent_release_is_refused_by_name(
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


# ---------------------------------------------------------------- a fresh machine

FRESH = ("HOME", "XDG_CACHE_HOME", "FLASH_ATTN_COMPAT_CACHE", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR", "TMPDIR")
TOLD = f"""
import json, os, tempfile
from pathlib import Path
folders = [os.environ[name] for name in {FRESH}]
contents = [os.listdir(folder) for folder in folders]
Path(tempfile.gettempdir(), "left").touch()
print(json.dumps([folders, contents, str(Path.home()), tempfile.gettempdir(), dict(os.environ)]))
raise SystemExit(7)
"""


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_a_fresh_command_finds_empty_folders_which_are_gone_after_it(tmp_path: Path) -> None:
    outside = {name: str(tmp_path) for name in FRESH}
    env = {**os.environ, **outside, "TRITON_CACHE_DIR": str(tmp_path), "PIP_INDEX_URL": "https://mirror"}
    pip = tmp_path / ".config/pip/pip.conf"
    pip.parent.mkdir(parents=True)
    pip.touch()
    for name in ("PIP_CONFIG_FILE", "PIP_CACHE_DIR", "XDG_CONFIG_HOME"):
        env.pop(name, None)
    command = [ROOT / ".ci/fresh", sys.executable, "-c", TOLD]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    folders, contents, home, temporary, inside = json.loads(done.stdout)
    assert len({str(tmp_path), *folders}) == 1 + len(FRESH) and contents == [[]] * len(FRESH)
    assert (home, temporary) == (folders[0], folders[-1])
    assert not any(map(os.path.exists, folders)) and os.listdir(tmp_path) == [".config"]
    assert "TRITON_CACHE_DIR" not in inside
    assert inside["PIP_INDEX_URL"] == "https://mirror"
    assert inside["PIP_CONFIG_FILE"] == str(pip) and inside["PIP_CACHE_DIR"] == f"{tmp_path}/pip"


def test_all_steps_of_ci_run_in_the_fresh_folders() -> None:
    """The script hands itself over before its first step."""
    script = (ROOT / ".ci/run").read_text()
    assert "exec .ci/fresh .ci/run --here" in script.partition("\nstep ")[0]


# ---------------------------------------------------------------- the workflows

WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
each_workflow = pytest.mark.parametrize("name", WORKFLOWS)


@each_workflow
def test_a_workflow_may_only_read_unless_one_of_its_jobs_says_otherwise(name: str) -> None:
    assert "\npermissions:\n  contents: read\njobs:\n" in WORKFLOWS[name]


@each_workflow
def test_a_workflow_runs_each_action_at_one_commit_and_says_its_version(name: str) -> None:
    used = re.findall(r"uses: (.*)", WORKFLOWS[name])
    assert used and not [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one)]


def test_all_workflows_run_the_same_commit_of_an_action() -> None:
    used = {one for text in WORKFLOWS.values() for one in re.findall(r"uses: (.*)", text)}
    assert len(used) == len({one.partition("@")[0] for one in used})


def test_a_change_starts_ci_once_and_a_tag_starts_the_release_alone() -> None:
    """A push to a branch with a pull request would otherwise run everything twice."""
    triggers = {name: text.partition("\non:\n")[2].partition("\npermissions:")[0] for name, text in WORKFLOWS.items()}
    assert triggers["ci.yml"] == "  push:\n    branches: [main]\n  pull_request:"
    assert [name for name, text in triggers.items() if "push:" in text] == ["ci.yml", "release.yml"]
    assert '  push:\n    tags: ["v*"]\n' in triggers["release.yml"]


def test_the_weekly_workflow_runs_all_tests_with_a_cuda_build_of_the_newest_torch_and_no_driver() -> None:
    weekly = [text for text in WORKFLOWS.values() if "schedule:" in text]
    (job,) = [job for text in weekly for job in re.split(r"\n  (?=\w)", text) if "--upgrade torch" in job]
    assert "assert torch.version.cuda and not torch.cuda.is_available()" in job and "constraints" not in job
    assert "run: python -m pytest\n" in job and "run: python -m verify --quick\n" in job
