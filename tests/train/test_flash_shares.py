"""``llmaas flash pack --sparse`` with torch: each activation leaves out its own share."""

from __future__ import annotations

import importlib.util
import shutil

import numpy as np
import pytest
from flash_models import tensors_of
from gguf import GGUFReader

from llmaas_plugins.cli.flash import pack, sharing
from llmaas_plugins.cli.main import main
from llmaas_plugins.flash_weights.channels import channel_path, open_channels
from llmaas_plugins.flash_weights.shares import SPARSITIES, equal_share

pytest.importorskip("torch", reason="make test-train installs it")


@pytest.fixture
def model(reference_model, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "_N_TOKENS", 64)
    monkeypatch.setattr(sharing, "_N_TOKENS", 256)
    return shutil.copy(reference_model, tmp_path / "model.gguf")


def shares_in(model):
    found = open_channels(channel_path(model), model, tensors_of(model)).operands
    return {key: channels.shares for key, channels in found.items()}


def test_shares_are_measured(model, tmp_path, capsys):
    assert main(["flash", "pack", "--sparse", str(model)]) == 0
    found = shares_in(model)
    assert any(not np.array_equal(share, equal_share()) for share in found.values())
    half = SPARSITIES.index(0.5)
    assert found[3, "ffn_down"][half] > 0.6 > found[3, "attn_qkv"][half]
    (text := tmp_path / "text").write_text("Each activation leaves out its own share. " * 40)
    assert main(["flash", "pack", "--sparse", "--text", str(text), str(model)]) == 0
    other = shares_in(model)
    assert any(not np.array_equal(other[key], share) for key, share in found.items())
    assert "the same share" not in capsys.readouterr().out


def test_equal_shares_are_used_where_they_are_wanted_or_torch_is_missing(
    model, monkeypatch, capsys
):
    assert main(["flash", "pack", "--sparse", "--equal-shares", str(model)]) == 0
    assert "the same share" not in capsys.readouterr().out
    content = channel_path(model).read_bytes()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(sharing, "find_spec", lambda _name: None)
    assert main(["flash", "pack", "--sparse", str(model)]) == 0
    expected = "the same share of each activation: torch is not installed: pip install"
    assert expected in capsys.readouterr().out
    assert channel_path(model).read_bytes() == content
    for share in shares_in(model).values():
        assert np.array_equal(share, equal_share())


def test_a_model_that_torch_cannot_compute_has_equal_shares(model, monkeypatch, capsys):
    from llmaas_hooks import ConfigError
    from llmaas_plugins.training import student

    def refuse(*_args, **_options):
        raise ConfigError("architecture 'other' is unknown")

    monkeypatch.setattr(student, "Teacher", refuse)
    assert main(["flash", "pack", "--sparse", str(model)]) == 0
    assert "of each activation: architecture 'other' is unknown" in capsys.readouterr().out


def test_memory_that_is_short_gives_equal_shares(model, monkeypatch, capsys):
    from llmaas_plugins.training import device

    monkeypatch.setattr(device, "free_bytes", lambda _device: 50 << 20)
    assert main(["flash", "pack", "--sparse", str(model)]) == 0
    out = capsys.readouterr().out
    assert "of each activation: measuring shares needs about" in out
    assert "of memory, but 50.0 MiB are available" in out
    for share in shares_in(model).values():
        assert np.array_equal(share, equal_share())


def test_a_model_whose_outputs_are_not_finite_is_refused(model, capsys):
    reader = GGUFReader(model, "r+")
    data = next(each.data for each in reader.tensors if each.name == "blk.1.ffn_down.weight")
    data[0, :2] = np.array([np.nan], np.float16).view(np.uint8)  # scale of the first block
    reader.data.flush()
    assert main(["flash", "pack", "--sparse", str(model)]) == 2
    assert "not finite. Is the file damaged?" in capsys.readouterr().err
    assert not channel_path(model).exists()
