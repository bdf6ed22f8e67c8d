"""Files that are replaced as a whole: their permissions."""

from __future__ import annotations

import stat
from collections import deque

import pytest

from llmaas_plugins.files.partial_file import replaced


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o400])
def test_a_replaced_file_keeps_its_permissions(tmp_path, mode):
    path, seen = tmp_path / "model.gguf", []
    path.write_bytes(b"old")
    path.chmod(mode)

    def contents():
        seen.append(_mode(path.with_name("model.gguf.partial")))
        yield b"new"

    deque(replaced(path, contents()), maxlen=0)
    assert path.read_bytes() == b"new"
    assert _mode(path) == mode
    assert seen == [0o600]  # nobody else reads it while it is written


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)
