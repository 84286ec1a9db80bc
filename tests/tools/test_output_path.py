"""The path of an option is tried before the work, and an existing file stays unchanged."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

import pytest

from flash_attn_compat.output_path import output_path

has_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")


def test_a_new_file_is_not_left_behind(tmp_path: Path) -> None:
    assert output_path(str(tmp_path / "new.json")) == tmp_path / "new.json" and not list(tmp_path.iterdir())


def test_a_file_that_is_there_keeps_its_content_and_its_time(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    os.utime(tmp_path / "old.json", (1, 1))
    output_path(str(tmp_path / "old.json"))
    assert (tmp_path / "old.json").read_text() == "{}" and (tmp_path / "old.json").stat().st_mtime == 1


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_to_a_new_file_stays_and_its_file_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "new.json")
    output_path(str(tmp_path / "link"))
    assert os.listdir(tmp_path) == ["link"]


@has_pipes
def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    """Opening it would wait for a reader, or end a reader's wait."""
    os.mkfifo(tmp_path / "pipe")
    assert output_path(str(tmp_path / "pipe")) == tmp_path / "pipe"


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_that_may_not_be_written_is_refused(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening it decides: root may write to a file of any mode."""

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    if exists:
        (tmp_path / "file").touch()
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(argparse.ArgumentTypeError, match=r"cannot write .*file: Permission denied"):
        output_path(str(tmp_path / "file"))


@has_pipes
def test_a_pipe_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe", stat.S_IRUSR)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match="pipe: Permission denied"):
        output_path(str(tmp_path / "pipe"))
