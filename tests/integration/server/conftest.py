"""The servers' model, and servers that cannot start."""

from __future__ import annotations

import pytest

from llmaas_plugins.cli.main import main


@pytest.fixture(scope="session")
def reference_model(packaged_model):
    """Return the packaged model, which these servers have."""
    return packaged_model


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return a function that serves with refused options and returns the last output line."""
    monkeypatch.chdir(tmp_path)

    def refused(*options):
        try:
            code = main(["serve", *options])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        assert (code, said.out) == (2, "")
        assert "Traceback" not in said.err
        return said.err.splitlines()[-1]

    return refused
