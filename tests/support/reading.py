"""A second process that is in the middle of reading an SQLite database."""

from __future__ import annotations

import contextlib
import subprocess
import sys

READ = """
import sqlite3, sys
db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True, isolation_level=None)
db.execute("BEGIN")
db.execute("SELECT count(*) FROM sqlite_master").fetchone()
print("reading", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def reader_of(database):
    """Run the reader inside the block; yield its process id."""
    with subprocess.Popen(
        [sys.executable, "-c", READ, str(database)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "reading\n"
        yield process.pid
        process.stdin.close()
