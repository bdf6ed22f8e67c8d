"""The files that a model was really loaded from, as plugins learn them."""

from __future__ import annotations

import ctypes
import os
import shutil

import pytest
from families import write_family
from llama_cpp import Llama, llama_cpp
from rewritten_models import write_split

from llmaas_eval.families import write_lora
from llmaas_hooks import FileStamp, hookimpl


class Noting:
    """Plugin that keeps every ``ModelLoad`` at context creation; it may act before a load."""

    def __init__(self):
        self.before, self.loads = (lambda load: None), []

    @hookimpl
    def llmaas_model_load(self, load):
        self.before(load)

    @hookimpl
    def llmaas_context_create(self, create):
        self.loads.append(create.load)


@pytest.fixture
def model(tmp_path):
    return write_family("llama", tmp_path / "model.gguf")


@pytest.fixture
def noted(patched):
    """Return a function that loads a model and returns the plugins' ``ModelLoad``."""
    plugin = Noting()
    patched(p=plugin)

    def load(path, before=lambda load: None, **settings):
        plugin.before = before
        Llama(str(path), n_ctx=64, n_threads=1, verbose=False, **settings).close()
        return plugin.loads[-1]

    load.plugin = plugin
    return load


def stamp(path):
    found = path.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return FileStamp(found.st_dev, found.st_ino, found.st_size, *times)


def test_files_are_those_that_were_opened(noted, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert noted("model.gguf").files == ((str(model), stamp(model)),)
    (tmp_path / "link.gguf").symlink_to(model)
    assert noted(tmp_path / "link.gguf").files == ((str(tmp_path / "link.gguf"), stamp(model)),)


def test_all_splits_are_files_of_a_model(noted, model):
    paths = write_split(model, 3)
    assert noted(paths[0]).files == tuple((str(path), stamp(path)) for path in paths)
    names = (ctypes.c_char_p * 3)(*(os.fsencode(path) for path in paths))
    address = llama_cpp.llama_model_load_from_splits(
        names, 3, llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    llama_cpp.llama_free(llama_cpp.llama_init_from_model(address, params))
    llama_cpp.llama_model_free(address)
    files = noted.plugin.loads[-1].files
    assert files == tuple((str(path), stamp(path)) for path in paths)


def test_a_file_named_like_a_split_is_a_whole_model(noted, model):
    whole = model.rename(model.parent / "x-00001-of-00002.gguf")
    assert noted(whole).files == ((str(whole), stamp(whole)),)


def test_a_file_that_is_replaced_or_changed_during_the_load_is_unknown(noted, model, tmp_path):
    other = shutil.copyfile(model, tmp_path / "other.gguf")

    def replace(load):
        other.replace(load.path)

    assert noted(model, replace).files == ((str(model), None),)
    assert noted(model, lambda load: os.utime(load.path)).files == ((str(model), None),)


def test_overrides_are_those_that_llama_cpp_gets(noted, model):
    given = {
        "llama.attention.layer_norm_rms_epsilon": 1e-3,
        "llama.context_length": 99,
        "tokenizer.ggml.add_bos_token": False,
        "general.name": "x" * 127,
    }
    assert noted(model).overrides == {}
    assert noted(model, kv_overrides=given).overrides == given


def test_an_adapter_is_the_file_that_was_loaded(noted, model, tmp_path):
    lora = write_lora("llama", tmp_path / "lora.gguf")
    load = noted(model, lora_path=str(lora))
    assert load.adapters == [(str(lora), stamp(lora))]
    assert noted(model).adapters == []
