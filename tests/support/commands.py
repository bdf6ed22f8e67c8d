"""Commands of another Python, as a user's shell would run them."""

from __future__ import annotations

import os
import subprocess


def run_python(python, *arguments, environ=None, **kwargs):
    """What it prints; it must succeed. The settings of this process and of its user stay here."""
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
