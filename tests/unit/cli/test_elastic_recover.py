"""``llmaas elastic recover`` before anything is learned: errors that say what to do."""

from __future__ import annotations

import importlib.util

import pytest

from llmaas_plugins.cli.main import main


@pytest.fixture
def without_torch(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *args: None if name == "torch" else found(name, *args),
    )


def test_without_torch_one_line_names_the_extra(without_torch, reference_model, capsys):
    assert main(["elastic", "recover", str(reference_model)]) == 2
    printed, said = capsys.readouterr()
    assert said == (
        "llmaas: error: learning adapters needs torch, which is not installed: pip install "
        "'llmaas-plugins[train]'.\n"
    )
    assert not printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "65"], "expected a rank of at most 64, found 65"),
        (["--rank", "0"], "expected an integer from 1 on"),
        (["--levels", "0.6,x"], "expected levels as 0.6,0.3, found '0.6,x'"),
        (["--tokens", "100"], "expected an integer from 2048 on"),
        (["--loss", "mse"], "invalid choice: 'mse'"),
    ],
)
def test_options_are_checked(reference_model, capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        main(["elastic", "recover", str(reference_model), *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
