"""``llmaas flash`` makes valid files and detects invalid ones."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from damages import flip
from flash_models import tensors_of
from gguf import GGMLQuantizationType

from llmaas_eval.models import SHAPE_TINY, write_random_model
from llmaas_plugins.cli.main import main
from llmaas_plugins.flash_weights.channels import channel_path, open_channels
from llmaas_plugins.flash_weights.packed import packed_path


@pytest.fixture(scope="module", autouse=True)
def _few_tokens():
    """Calibrate with few tokens, to save time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("llmaas_plugins.cli.flash.pack._N_TOKENS", 64)
        patched.setattr("llmaas_plugins.cli.flash.pack._N_FORESEEN", 16)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model with both files, made by the command."""
    path = tmp_path_factory.mktemp("flash") / "model.gguf"
    write_random_model(path, SHAPE_TINY, GGMLQuantizationType.Q8_0)
    assert main(["flash", "pack", "--sparse", "--equal-shares", str(path)]) == 0
    return path


@pytest.fixture
def model(made, tmp_path):
    """Return a copy of the model and both files."""
    for path in made.parent.iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path / made.name


def run(capsys, *command):
    """Return the exit status, output and errors of a command."""
    capsys.readouterr()
    status = main(["flash", *map(str, command)])
    return status, *capsys.readouterr()


def test_both_files_are_made_and_nothing_else(made, capsys):
    names = sorted(path.name for path in made.parent.iterdir())
    assert names == ["model.channels", "model.gguf", "model.packed"]
    status, out, _ = run(capsys, "check", made)
    assert status == 0
    assert [line.rpartition(": ")[2] for line in out.splitlines()] == ["sound", "sound"]
    found = open_channels(channel_path(made), made, tensors_of(made))
    assert len(found.operands) == 4
    assert found.operands[0, "ffn_down"].threshold(0.5) > 0


def test_a_packed_file_that_is_good_is_left_as_it_is(model, capsys):
    before, columns = packed_path(model).stat(), channel_path(model).read_bytes()
    status, out, _ = run(capsys, "pack", "--sparse", "--equal-shares", model)
    assert status == 0
    assert packed_path(model).stat().st_ino == before.st_ino
    assert str(channel_path(model)) in out
    assert str(packed_path(model)) not in out
    assert channel_path(model).read_bytes() == columns


@pytest.mark.parametrize("damage", ["none", "stale", "broken"])
def test_a_packed_file_that_is_not_is_made_again(model, capsys, damage):
    expected = packed_path(model).read_bytes()
    if damage == "none":
        packed_path(model).unlink()
    elif damage == "broken":
        packed_path(model).write_bytes(b"broken")
    else:
        flip(model, model.stat().st_size - 100)
    status, out, _ = run(capsys, "pack", "--sparse", "--equal-shares", model)
    assert status == 0
    assert str(packed_path(model)) in out
    assert (packed_path(model).read_bytes() == expected) == (damage != "stale")
    assert run(capsys, "check", model)[0] == 0


def test_layers_are_grouped_and_a_text_decides(model, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(b"To be, or not to be, that is the question. \xff" * 40)
    command = ["pack", "--sparse", "--equal-shares", "--group-layers", "3", "--text", text, model]
    before = open_channels(channel_path(model), model, tensors_of(model)).operands
    assert run(capsys, *command)[0] == 0
    found = open_channels(channel_path(model), model, tensors_of(model))
    assert found.group_layers == 3
    key = 0, "attn_qkv"
    assert found.operands[key].threshold(0.5) != before[key].threshold(0.5)


@pytest.mark.parametrize("place", [packed_path, channel_path], ids=["packed", "channels"])
def test_what_is_damaged_is_found_and_named(model, capsys, place):
    path = place(model)
    flip(path, path.stat().st_size - 4096)
    status, out, _ = run(capsys, "check", model)
    assert status == 1
    assert f"{path.name}: " in out
    assert "differs from what was written" in out
    option = "--sparse " if place is channel_path else ""
    assert out.count(f"`llmaas flash pack {option}{model}` writes it again.") == 1
    status, out, _ = run(capsys, "check", "--json", model)
    assert status == 1
    files = {report["file"]: report for report in json.loads(out)["files"]}
    assert [
        bool(files[str(place(model))]["problems"]) for place in (packed_path, channel_path)
    ] == [
        place is packed_path,
        place is channel_path,
    ]
    assert files[str(path)]["bytes"] == path.stat().st_size
    assert files[str(path)]["tensors"] > 0


@pytest.mark.parametrize("content", [b"", b"GGUF", bytes(9999)], ids=["empty", "short", "zeros"])
def test_what_is_something_else_is_a_problem(model, capsys, content):
    packed_path(model).write_bytes(content)
    status, out, _ = run(capsys, "check", model)
    assert status == 1
    assert "is not a packed file, or is damaged" in out
    assert "model.channels: " in out


def test_what_is_of_another_model_is_a_problem(model, capsys):
    flip(model, model.stat().st_size - 100)
    status, out, _ = run(capsys, "check", model)
    assert status == 1
    assert out.count("it was made from another model file") == 2


def test_only_the_files_that_are_there_are_checked(model, capsys):
    channel_path(model).unlink()
    status, out, _ = run(capsys, "check", model)
    assert (status, len(out.splitlines())) == (0, 1)
    packed_path(model).unlink()
    status, out, _ = run(capsys, "check", model)
    assert status == 1
    assert "has no packed file and no channel file" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "{model}"], "--text has no effect without --sparse"),
        (["--group-layers", "2"], "--group-layers has no effect without --sparse"),
        (["--sparse", "--text", "{model}.none"], "No such file"),
        (["--sparse", "--text", "{empty}"], "no text to calibrate with"),
    ],
)
def test_what_cannot_be_asked_for(model, tmp_path, capsys, options, message):
    (tmp_path / "empty").touch()
    before = channel_path(model).read_bytes()
    texts = [option.format(model=model, empty=tmp_path / "empty") for option in options]
    status, _, err = run(capsys, "pack", *texts, model)
    assert status == 2
    assert message in err
    assert channel_path(model).read_bytes() == before


@pytest.mark.parametrize("place", [packed_path, channel_path])
@pytest.mark.parametrize("action", ["pack", "check"])
def test_a_packed_file_is_no_model(model, capsys, place, action):
    before = {path: path.read_bytes() for path in model.parent.iterdir()}
    status, out, err = run(capsys, action, place(model))
    assert (status, out) == (2, "")
    assert "expected the model: name the GGUF file beside it" in err
    assert {path: path.read_bytes() for path in model.parent.iterdir()} == before


@pytest.mark.parametrize("n", ["0", "65", "few"])
def test_groups_have_sizes(model, capsys, n):
    with pytest.raises(SystemExit) as error:
        run(capsys, "pack", "--sparse", "--group-layers", n, model)
    assert error.value.code == 2


def test_a_mixtures_experts_have_no_channels(tmp_path, capsys):
    shape = dataclasses.replace(SHAPE_TINY, n_expert=2)
    path = write_random_model(tmp_path / "model.gguf", shape)
    assert run(capsys, "pack", "--sparse", path)[0] == 0
    found = open_channels(channel_path(path), path, tensors_of(path))
    assert list(found.operands) == [(0, "attn_qkv"), (0, "attn_output")]


def test_stopping_is_no_accident(model, capsys, monkeypatch):
    def stopped(*_args, **_options):
        yield 1
        raise KeyboardInterrupt

    monkeypatch.setattr("llmaas_plugins.flash_weights.packed.write_packed", stopped)
    status, _, err = run(capsys, "pack", model)
    assert status == 130
    assert "stopped; repeat the command" in err
