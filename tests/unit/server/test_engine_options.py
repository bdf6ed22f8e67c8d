"""llama_cpp.server's options: only what was typed counts, and it is checked before the start."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys

import numpy as np
import pytest

pytest.importorskip("fastapi")

from gguf import GGUFWriter
from llama_cpp.llama_chat_format import Jinja2ChatFormatter, get_chat_completion_handler
from llama_cpp.server import model as server_model
from llama_cpp.server.settings import ModelSettings

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.serve import _settings
from llmaas_plugins.server.engine_options import _FILES, _NEEDS
from llmaas_plugins.server.option_values import _SET_BY_LLAMA_CPP


def settings(*typed):
    args = argparse.Namespace(toy=True, verbose=False, server_help=False, uds=None)
    return _settings(args, list(typed))


@pytest.fixture
def refusal():
    """Return a function that returns the error for options, which fits in one line."""

    def refusal(*typed):
        with pytest.raises(ConfigError) as caught:
            settings(*typed)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refusal


def written(path, **fields):
    writer = GGUFWriter(path, "llama")
    for name, value in fields.items():
        writer.add_string(name.replace("_", "."), value)
    writer.add_tensor("a", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


# -- the environment -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HOST", "0.0.0.0"),
        ("PORT", "99"),
        ("API_KEY", "key"),
        ("ROOT_PATH", "/x"),
        ("SSL_KEYFILE", "key.pem"),
        ("SEED", "abc"),
        ("SEED", "5"),
        ("CACHE", "true"),
        ("LORA_PATH", "/nope.gguf"),
        ("N_CTX", "64"),
        ("chat_format", "chatml"),
    ],
)
def test_variables_of_other_programs_do_not_count(monkeypatch, variable, value):
    expected = settings()
    monkeypatch.setenv(variable, value)
    found = settings()
    assert [dict(part) for part in found] == [dict(part) for part in expected]


def test_typed_options_count(monkeypatch):
    monkeypatch.setenv("HOST", "0.0.0.0")
    server, model = settings("--host", "127.0.0.2", "--n_ctx", "64", "--seed", "5")
    assert (server.host, model.n_ctx, model.seed) == ("127.0.0.2", 64, 5)
    assert isinstance(model, ModelSettings)


# -- files -----------------------------------------------------------------------------------------


def test_every_option_that_names_a_file_is_checked():
    paths = {name for name in ModelSettings.model_fields if re.search("path|lora_", name)}
    assert paths == {*_FILES, "hf_pretrained_model_name_or_path", "lora_base"}


@pytest.mark.parametrize("name", _FILES)
def test_files_that_cannot_be_read(tmp_path, refusal, name):
    assert refusal(f"--{name}", "/nope").startswith(f"cannot read --{name} /nope: No such file")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert "expected a regular file" in refusal(f"--{name}", str(path))


def test_files_that_are_no_adapters(tmp_path, refusal):
    (tmp_path / "text").write_text("no adapter")
    assert "text is not a GGUF file" in refusal("--lora_path", str(tmp_path / "text"))
    model = written(tmp_path / "model.gguf", general_type="model")
    message = refusal("--lora_path", model)
    assert "model.gguf is no adapter: expected 'adapter' as its general.type" in message
    assert "found 'model'" in message
    other = written(tmp_path / "other.gguf", general_type="adapter", adapter_type="other")
    assert "as its adapter.type, found 'other'" in refusal("--lora_path", other)


def test_an_adapter(tmp_path):
    path = written(tmp_path / "lora.gguf", general_type="adapter", adapter_type="lora")
    assert settings("--lora_path", path)[1].lora_path == path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON: "),
        ("[" * 100_000, "is no JSON: "),
        ("[]", "found no chat_template and no bos_token and no eos_token"),
        ('{"chat_template": "x", "bos_token": "a", "eos_token": null}', "found no eos_token. Use"),
    ],
)
def test_files_that_describe_no_tokenizer(tmp_path, refusal, content, message):
    (tmp_path / "config").write_text(content)
    assert message in refusal("--hf_tokenizer_config_path", str(tmp_path / "config"))


# -- chat formats and cells ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "llama-2", "chat_template.default"])
def test_chat_formats(name):
    assert settings("--chat_format", name)[1].chat_format == name


@pytest.mark.parametrize("name", ["nonsense", "", "chat_template.none"])
def test_chat_formats_that_do_not_exist(refusal, name):
    message = refusal("--chat_format", name)
    assert f"no chat format {name!r}" in message
    assert "chatml" in message
    assert "llava-1-5" in message


def test_a_chat_format_without_its_file(refusal):
    assert refusal("--chat_format", "mtmd").startswith("--chat_format mtmd needs --clip_model_path")


def test_files_without_the_chat_format_that_uses_them(tmp_path, refusal):
    (tmp_path / "config").write_text('{"chat_template": "x", "bos_token": "a", "eos_token": "b"}')
    path = str(tmp_path / "config")
    tokenizer = ("--hf_tokenizer_config_path", path)
    assert "no effect without --chat_format hf-tokenizer-config" in refusal(*tokenizer)
    assert settings(*tokenizer, "--chat_format", "hf-tokenizer-config")[1]
    images = ("--clip_model_path", path)
    for other in ((), ("--chat_format", "chatml")):
        assert "--clip_model_path has no effect without" in refusal(*images, *other)
    assert settings(*images, "--chat_format", "mtmd")[1]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--vocab_only", "True"], "--vocab_only loads no weights, so that no call could"),
        (["--n_threads", "513"], "--n_threads must be from 1 to 512, found 513"),
        (["--n_threads_batch", "100000"], "--n_threads_batch must be from 0 to 512"),
        (["--last_n_tokens_size", "2147483647"], "must be from 0 to 1048576, found 21474"),
        (
            ["--draft_model_num_pred_tokens", "-3"],
            "must be from 0 to 2147483647, found -3",
        ),
        (
            ["--chat_template_kwargs", '{"a": 1, "eos_token": 5}'],
            "cannot set eos_token, w",
        ),
        (["--chat_template_kwargs", '{"tools": []}'], "llama_cpp itself gives to chat"),
        (
            ["--lora_base", "x.gguf"],
            "--lora_base has no effect: adapters are added to the",
        ),
    ],
)
def test_values_with_which_no_call_succeeds_or_without_effect(refusal, typed, message):
    assert message in refusal(*typed)


def test_options_that_need_what_is_not_installed(monkeypatch, refusal):
    tokenizer = ("--hf_pretrained_model_name_or_path", "x")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(*tokenizer).startswith(f"{tokenizer[0]} needs transformers. Try `pip install")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    assert settings(*tokenizer)[1]
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_supports_rpc", lambda: False)
    assert "--rpc_servers has no effect" in refusal("--rpc_servers", "127.0.0.1:1")
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_supports_rpc", lambda: True)
    assert settings("--rpc_servers", "127.0.0.1:1")[1]


def test_the_toy_has_the_context_that_it_was_trained_for():
    assert settings()[1].n_ctx == 0
    assert settings("--n_ctx", "64")[1].n_ctx == 64


def test_arguments_of_chat_templates_that_llama_cpp_sets():
    source = inspect.getsource(Jinja2ChatFormatter.__call__)
    assert set(_SET_BY_LLAMA_CPP) == set(re.findall(r"^ {12}(\w+)=", source, re.MULTILINE)) - {
        "prompt",
        "stop",
        "stopping_criteria",
        "added_special",
    }
    assert settings("--chat_template_kwargs", '{"enable_thinking": true}')[1]


@pytest.mark.parametrize("name", ["functionary-v1", "functionary-v2"])
def test_formats_that_need_a_tokenizer(refusal, monkeypatch, name):
    needed = "--hf_pretrained_model_name_or_path"
    assert refusal("--chat_format", name) == f"--chat_format {name} needs {needed}. Give it, too."
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    assert settings("--chat_format", name, needed, "x")[1]


@pytest.mark.parametrize("name", ["rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"])
def test_numbers_that_give_no_probabilities(refusal, name):
    assert refusal(f"--{name}", "-1").startswith(f"--{name} must be at least 0, found -1: no token")
    assert settings(f"--{name}", "1")[1]


def test_overrides_of_another_type_than_the_files(refusal):
    wrong = {"float:512": "int", "int:1": "bool", "str:x": "list"}
    keys = ("llama.context_length", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.tokens")
    for key, (value, kind) in zip(keys, wrong.items(), strict=True):
        found = refusal("--kv_overrides", f"{key}={value}")
        assert found.startswith(f"--kv_overrides {key}={value} has no effect: the file's {key}")
        assert f"has the type {kind}." in found
    for right in ("llama.context_length=int:512", "another.key=bool:true"):
        assert settings("--kv_overrides", right)[1].kv_overrides == [right]


def test_the_formats_that_the_server_makes_are_all_known():
    source = inspect.getsource(server_model.LlamaProxy.load_llama_from_model_settings)
    tests = re.findall(r"settings\.chat_format (?:==|in) (.*):", source)
    made = set(re.findall(r'"([^"]+)"', " ".join(tests)))
    assert made == set(_NEEDS)
    for name in made:
        with pytest.raises(Exception, match="Invalid chat handler"):
            get_chat_completion_handler(name)


@pytest.mark.parametrize("name", ["type_k", "type_v"])
def test_types_of_cells(refusal, name):
    for wrong in (-1, 4, 12, 26, 31, 42, 43, 99):  # ggml ends the process for most of these
        assert f"--{name}: contexts have no cells of type {wrong}" in refusal(
            f"--{name}", str(wrong)
        )
    assert getattr(settings(f"--{name}", "8")[1], name) == 8
