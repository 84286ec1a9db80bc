"""CI runs as on a machine that remembers nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
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

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a shell script")


def test_a_fresh_command_finds_empty_folders_which_are_gone_after_it(tmp_path: Path) -> None:
    outside = {name: str(tmp_path) for name in FRESH}
    env = {**os.environ, **outside, "TRITON_CACHE_DIR": str(tmp_path), "PIP_INDEX_URL": "https://mirror"}
    pip = tmp_path / ".config/pip/pip.conf"
    pip.parent.mkdir(parents=True)
    pip.touch()
    for name in ("PIP_CONFIG_FILE", "PIP_CACHE_DIR", "XDG_CONFIG_HOME"):
        env.pop(name, None)
    command = [REPOSITORY / ".ci/fresh", sys.executable, "-c", TOLD]
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
    script = (REPOSITORY / ".ci/run").read_text()
    assert "exec .ci/fresh .ci/run --here" in script.partition("\nstep ")[0]
