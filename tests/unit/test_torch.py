"""Torch is for offline stages: few modules import it, and others import these only when needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = """
import importlib, pkgutil, sys
sys.modules["torch"] = None  # importing it fails from here on
import llmaas_plugins
from llmaas_plugins.cli.main import main
found = []
for module in pkgutil.walk_packages(llmaas_plugins.__path__, "llmaas_plugins."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:  # of an extra
        if error.name == "torch":
            found.append(module.name)
print(*sorted(found))
with llmaas_plugins.activate({}):
    main(sys.argv[1:])
"""


def without_torch(*arguments):
    command = [sys.executable, "-c", _WITHOUT, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_it_is_imported_by_offline_modules_and_neither_by_activation_nor_for_help():
    found, help_ = without_torch("--help").split("\n", 1)
    others = [name for name in found.split() if not name.startswith("llmaas_plugins.training.")]
    assert others == ["llmaas_plugins.elastic.gradients", "llmaas_plugins.elastic.torch_model"]
    assert help_.startswith("usage: llmaas")
