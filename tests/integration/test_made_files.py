"""Files that were made of a model and are loaded in its place."""

from __future__ import annotations

import logging
import sys

import pytest
from families import write_family
from llama_cpp import Llama, _utils

from llmaas_eval.families import write_lora
from llmaas_hooks import ConfigError, hookimpl
from llmaas_plugins import activate
from llmaas_plugins.cli.doctor.diagnosis import diagnose
from llmaas_plugins.config import load_config
from llmaas_plugins.model.digest import file_digest


@pytest.fixture
def files(tmp_path):
    """Return a model and a file that stands for what was made of it."""
    model = write_family("llama", tmp_path / "model.gguf")
    return model, write_family("llama", tmp_path / "made.gguf", seed=1)


def table(model, made):
    entry = {"file": str(made), "digest": file_digest(model), "file_digest": file_digest(made)}
    return {"plugins": {"deadlines": {}}, "on_error": "raise", "models": {str(model): entry}}


def opened(path, **settings):
    llama = Llama(str(path), n_ctx=64, n_threads=1, verbose=False, **settings)
    text = llama.create_completion([1, 5, 9], max_tokens=8, temperature=0)["choices"][0]["text"]
    llama.close()
    return text


def test_hook_llmaas_model_path(patched, files, caplog):
    model, made = files
    own, other = opened(model), opened(made)
    assert own != other
    loads = []

    class Plugin:
        @hookimpl
        def llmaas_model_path(self, path):
            return str(made) if path == str(model) else None

        @hookimpl
        def llmaas_model_load(self, load):
            loads.append((load.path, load.in_place_of, load.files[0].path))

    patched(p=Plugin())
    assert opened(model) == other
    assert opened(made) == other
    assert loads == [(str(made), str(model), str(made)), (str(made), None, str(made))]


def test_a_made_file_is_loaded_and_reported(files, monkeypatch):
    model, made = files
    other = opened(made)
    with activate(table(model, made)) as suite:
        monkeypatch.chdir(model.parent)
        assert opened("model.gguf") == other
        assert suite.status()["plugins"]["models"] == {"loaded": {"model.gguf": str(made)}}


@pytest.mark.parametrize("which", ["model", "made", "gone"])
def test_what_was_changed_since_is_not_replaced(files, caplog, which):
    model, made = files
    settings = table(model, made)
    if which == "gone":
        made.unlink()
    else:
        write_family("llama", {"model": model, "made": made}[which], seed=2)
    own = opened(model)
    with activate(settings), caplog.at_level(logging.WARNING):
        assert opened(model) == own
    expected = f"there is no file {made}" if which == "gone" else "was changed since"
    assert expected in caplog.text
    assert f"`llmaas setup {model}`" in caplog.text


def test_the_log_says_so_even_if_the_app_is_silent(files, monkeypatch):
    """``Llama(verbose=False)`` discards stderr while it loads a model."""
    model, made = files
    settings = table(model, made)
    made.unlink()
    logged = []

    class Handler(logging.Handler):
        def emit(self, record):
            if sys.stderr is not _utils.errnull_file:
                logged.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger("llmaas"), "handlers", [Handler()])
    with activate(settings):
        opened(model)
    assert any(f"there is no file {made}" in line for line in logged)


def test_an_adapter_of_the_replaced_model_is_refused(files, tmp_path):
    model, made = files
    adapter = write_lora("llama", tmp_path / "lora.gguf")
    with activate(table(model, made)):
        with pytest.raises(ConfigError, match=r"in place of .*table \[models\]"):
            opened(model, lora_path=str(adapter))
        opened(made, lora_path=str(adapter))  # the app named this file itself


def test_paths_of_the_table_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = {"file": "made.gguf", "digest": "0" * 64, "file_digest": "1" * 64}
    config = load_config({"models": {"model.gguf": entry}})
    ((name, made),) = config.models.items()
    assert (name, made.file) == (str(tmp_path / "model.gguf"), tmp_path / "made.gguf")
    assert config == load_config({"models": {str(tmp_path / "model.gguf"): entry}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "abc"}, "models.m.gguf.digest: .*found 'abc'"),
        ({"extra": 1}, "unknown key 'models.m.gguf.extra'|unknown key"),
    ],
)
def test_a_wrong_entry_is_refused(change, message):
    entry = {"file": "made.gguf", "digest": "0" * 64, "file_digest": "1" * 64}
    with pytest.raises(ConfigError, match=message):
        load_config({"models": {"m.gguf": entry | change}})


def test_doctor_checks_the_table(files):
    model, made = files
    entry = table(model, made)["models"][str(model)]
    config = model.parent / "llmaas.toml"
    lines = "".join(f'{key} = "{value}"\n' for key, value in entry.items())
    config.write_text(f'[models."{model}"]\n{lines}')

    def finding():
        return next(one for one in diagnose(str(config)) if one.name == f"models.{model}")

    assert (finding().value, finding().problem) == (str(made), None)
    made.unlink()
    assert finding().problem == f"there is no file {made}"
    assert f"`llmaas setup {model}`" in finding().next_step
