"""``llmaas flash distill`` before anything is learned: errors that say what to do."""

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
    assert main(["flash", "distill", str(reference_model)]) == 2
    printed, said = capsys.readouterr()
    assert said == (
        "llmaas: error: distillation needs torch, which is not installed: pip install "
        "'llmaas-plugins[train]'.\n"
    )
    assert not printed
    assert not list(reference_model.parent.glob("*.distill"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "100"], "expected an integer from 2048 on"),
        (["--sparsity", "0"], "expected a share above 0 and up to 0.95, found '0'"),
        (["--sparsity", "0.96"], "expected a share above 0 and up to 0.95, found '0.96'"),
        (["--sparsity", "half"], "expected a share above 0 and up to 0.95, found 'half'"),
        (["--sparsity", "nan"], "expected a share above 0 and up to 0.95, found 'nan'"),
    ],
)
def test_options_are_checked(reference_model, capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        main(["flash", "distill", str(reference_model), *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
