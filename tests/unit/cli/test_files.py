"""Text files that commands read: every other file is refused in one line, and at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmaas_hooks import ConfigError
from llmaas_plugins.cli import files
from llmaas_plugins.cli.files import content_of


@pytest.fixture
def refusal():
    def refusal(path):
        with pytest.raises(ConfigError) as caught:
            content_of(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refusal


def test_a_text(tmp_path):
    (tmp_path / "text").write_bytes(b"some text")
    assert content_of(tmp_path / "text") == b"some text"


def test_what_is_no_text(tmp_path, refusal):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert refusal(path).startswith(f"cannot read {path}: it is a pipe or a device, expected")
    assert refusal(tmp_path) == f"cannot read {tmp_path}: Is a directory."
    assert refusal(tmp_path / "none").endswith("none: No such file or directory.")


def test_a_text_that_is_too_long(tmp_path, refusal, monkeypatch):
    with (tmp_path / "long").open("wb") as file:
        file.truncate((1 << 30) + 1)  # takes no space
    assert "it has 1073741825 bytes, expected at most 1073741824" in refusal(tmp_path / "long")
    monkeypatch.setattr(files, "_MOST_BYTES", 4)
    (tmp_path / "text").write_bytes(b"four")
    assert content_of(tmp_path / "text") == b"four"
