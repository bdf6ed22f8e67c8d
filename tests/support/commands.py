"""Commands as a user's shell runs them, and what they print."""

from __future__ import annotations

import os
import subprocess


def mistake(capsys, arguments):
    """Return the one line that a command says to a mistake, for which it ends with code 2."""
    from llmaas_plugins.cli.main import main

    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err.count("error: ") == 1
    assert "Traceback" not in said.err
    return said.err.splitlines()[-1]


def run_python(python, *arguments, environ=None, **kwargs):
    """Run a command that must succeed and return its output.

    The command does not inherit settings of this process or of its user.
    """
    unset = ("LLMAAS", "PIP_", "PYTHON")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(unset)}
    done = subprocess.run(
        [python, *map(str, arguments)],
        env=inherited
        | {"LLMAAS_CONFIG": "", "PIP_CONFIG_FILE": os.devnull, "PYTHONDONTWRITEBYTECODE": "1"}
        | (environ or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def error_of(captured):
    """Return a command's error; assert that it is one line, and all that was printed."""
    assert captured.out == ""
    assert captured.err.startswith("llmaas: error: ")
    assert captured.err.count("\n") == 1
    return captured.err
