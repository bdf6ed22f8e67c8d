"""Progress of long commands, on a terminal and in logs."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

from llmaas_plugins.cli import output


class Terminal(io.StringIO):
    """Terminal that keeps what was written."""

    def isatty(self):
        return True


def test_a_log_gets_lines_now_and_then(monkeypatch):
    monkeypatch.setattr(output, "_LINE_S", 0.02)
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with output.progress_bar("reading", "token", 4) as bar:
        for _ in range(4):
            time.sleep(0.03)
            bar.update()
    lines = log.getvalue().split("\n")
    assert lines.pop() == ""
    assert len(lines) >= 2
    assert all(line.startswith("reading: ") and "\r" not in line for line in lines)
    assert " 25%" in lines[0]


def test_what_takes_a_moment_leaves_nothing_in_a_log(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    assert list(output.progress("reading", "row")(range(3))) == [0, 1, 2]
    assert log.getvalue() == ""


def test_a_terminal_shows_a_bar_in_one_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with output.progress_bar("reading", "token", 4) as bar:
        bar.update(4)
    assert terminal.getvalue().startswith("\rreading: ")
    assert "\n" not in terminal.getvalue()


def test_work_goes_on_if_nobody_reads_the_log_any_more(monkeypatch):
    monkeypatch.setattr(output, "_LINE_S", 0)
    reader, writer = os.pipe()
    os.close(reader)
    done = []
    with os.fdopen(writer, "w", buffering=1) as log, Path(os.devnull).open("w") as unread:
        monkeypatch.setattr(sys, "stderr", log)
        for row in output.progress("reading", "row")(range(3)):
            time.sleep(0.01)
            done.append(row)
        os.dup2(unread.fileno(), writer)  # what is buffered can be written now
    assert done == [0, 1, 2]
