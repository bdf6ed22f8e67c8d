"""``llmaas serve`` refuses what it cannot serve, in one line and without loading a model."""

from __future__ import annotations

import argparse
import re
import socket
from pathlib import Path

import fork_server
import numpy as np
import pytest
from served import LLMAAS

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.serve import _settings

pytest.importorskip("fastapi")

from gguf import GGUFWriter
from llama_cpp.server.settings import ModelSettings, ServerSettings


def test_a_model_that_is_none(refused, tmp_path):
    (tmp_path / "app.py").write_text("print('hello')")
    message = refused("--model", "app.py", "--port", "0")
    assert message.startswith("llmaas: error: app.py is not a GGUF file, or is damaged: ")


def test_a_socket_directory_that_others_can_enter(refused, tmp_path):
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o710)
    message = refused("--toy", "--uds", "open/service.sock")
    assert message.startswith(f"llmaas: error: other users can enter {directory}.")
    assert f"mkdir -m 700 {directory}/llmaas" in message
    assert list(directory.iterdir()) == []


def test_contexts_that_cannot_be_used(refused, tmp_path):
    (tmp_path / "llmaas.toml").write_text('[service]\nstate_dir = "state"')
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "contexts.sqlite").write_text("not a database, but longer than nothing")
    message = refused("--toy", "--config", "llmaas.toml")
    assert "state/contexts.sqlite: file is not a database" in message


def test_another_model_configuration(refused, monkeypatch):
    monkeypatch.setenv("CONFIG_FILE", "models.json")
    assert "CONFIG_FILE is set, but `llmaas serve` does not read it" in refused("--toy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no model is given. Use --model FILE, or --toy"),
        (["--toy", "--model", "x.gguf"], "both --model and --toy are given"),
        (["--toy", "--port", "99999"], "--port must be from 0 to 65535"),
        (["--toy", "--ssl_certfile", "none"], "cannot use --ssl_certfile none"),
        (["--toy", "--cache", "True"], "--cache would let apps learn from response times"),
        (["--model", "none.gguf"], "found no file none.gguf; expected a model in GGUF"),
        (["--model", "."], "error: . is a folder, expected a model in GGUF"),
        (["llmaas.toml"], "arguments: llmaas.toml. Did you mean '--model llmaas.toml'?"),
        (["--toy", "--n_ctx", "-5"], "error: --n_ctx: Input should be greater than or equal to 0"),
        (["--toy", "--n_ctx", "999999999"], "of memory; expected at most "),
        (["--toy", "--n_ctx", "999999999"], "The model was trained with 1,024"),
        (["--toy", "--lora_path", "none.gguf"], "cannot read --lora_path none.gguf: No such file"),
        (["--toy", "--chat_format", "chatlm"], "no chat format 'chatlm'. Did you mean 'chatglm3'?"),
        (
            ["--toy", "--type_k", "99"],
            "--type_k: contexts have no cells of type 99. Known: 0 (f32)",
        ),
        (["--toy", "--draft_model", "x.gguf"], "'x.gguf'. Known: prompt-lookup-decoding."),
        (["--toy", "--split_mode", "77"], "--split_mode: unknown value 77. Known: 0, 1, 2, 3."),
        (["--toy", "--rope_scaling_type", "9"], "unknown value 9. Known: -1, 0, 1, 2, 3."),
        (["--toy", "--kv_overrides", "a=b"], "expected KEY=TYPE:VALUE with bool, int, float or"),
        (["--toy", "--kv_overrides", "a=float:1.2.3"], "TYPE, found 'a=float:1.2.3'"),
        (["--toy", "--kv_overrides", "a=int:x"], "float or str as TYPE, found 'a=int:x'"),
        (["--toy", "--uds", "s", "--host", "127.0.0.1"], "--host has no effect with --uds"),
        (["--toy", "--uds", "s", "--port", "8000"], "--port has no effect with --uds"),
        (["--toy", "--uds", "s", "--ssl_certfile", "c"], "--ssl_certfile has no effect with --uds"),
        (
            ["--n-ctx", "5"],
            "error: unrecognized arguments: --n-ctx 5. Did you mean '--n_ctx'? `llmaas serve --ser",
        ),
        (["--xyz", "5"], "error: unrecognized arguments: --xyz 5. `llmaas serve --server-help`"),
    ],
)
def test_mistakes(refused, options, message):
    Path("llmaas.toml").touch()  # in the test's own folder
    assert message in refused(*options)


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "127.0.0.1"], False),
        (["--host", "0.0.0.0", "--api_key", "sesame"], False),
    ],
)
def test_a_service_that_is_open_to_the_network_says_so(refused, caplog, options, is_warned):
    with socket.create_server(("", 0)) as taken:
        assert "in use" in refused("--toy", *options, "--port", str(taken.getsockname()[1]))
    assert ("everyone who reaches 0.0.0.0 may use the service" in caplog.text) == is_warned


def test_an_adapter_of_another_model(refused, tmp_path):
    writer = GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    for half in "ab":
        writer.add_tensor(f"blk.99.attn_q.weight.lora_{half}", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = refused("--toy", "--lora_path", "lora.gguf", "--n_ctx", "64", "--port", "0")
    assert message.startswith("llmaas: error: --lora_path lora.gguf does not fit the model")


def numbers():
    """Yield the names of llama_cpp.server's options that are numbers."""
    for settings in (ModelSettings, ServerSettings):
        for name, field in settings.model_fields.items():
            if re.search(r"\b(int|float)\b", str(field.annotation)):
                yield name


@pytest.mark.parametrize("value", [str(2**63), str(2**70), str(-(2**70)), "inf", "nan", "1e308"])
@pytest.mark.parametrize("name", list(numbers()))
def test_numbers_of_absurd_sizes(name, value):
    args = argparse.Namespace(toy=True, verbose=False, server_help=False, uds=None)
    with pytest.raises(ConfigError, match=name):
        _settings(args, [f"--{name}", value])


def test_the_largest_numbers():
    args = argparse.Namespace(toy=True, verbose=False, server_help=False, uds=None)
    _, model = _settings(args, ["--seed", str(2**32 - 1), "--n_batch", str(2**31 - 1)])
    assert (model.seed, model.n_batch) == (2**32 - 1, 2**31 - 1)


def test_a_misspelled_option_takes_one_line():
    done = fork_server.run([*LLMAAS, "serve", "--modle", "x"], capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_server_help():
    done = fork_server.run(
        [*LLMAAS, "serve", "--server-help"], capture_output=True, text=True, check=True
    )
    assert "--n_gpu_layers" in done.stdout


CLOUD = '[cloud]\nbase_url = "http://localhost:1/v1"\nmodel = "large"\nkey_env = "CLOUD_KEY"\n'


@pytest.mark.parametrize(
    ("key", "tables", "message"),
    [
        ("", "", "cloud.key_env: the variable CLOUD_KEY is not set"),
        (" ", "", "cloud.key_env: the variable CLOUD_KEY is not set"),
        ("sesame\nX: 1", "", "the variable CLOUD_KEY must contain printable ASCII"),
        ("k", "[cloud.apps.mial]\nprivate = true", "no such app in service.key_file. Did you mean"),
        ("k", "[cloud.apps.mail]\nkeep = true", "cloud.apps.mail.keep needs the datastore"),
    ],
)
def test_a_cloud_that_cannot_be_asked(refused, monkeypatch, key, tables, message):
    keys = Path("keys.toml")  # in the test's own folder
    keys.touch(mode=0o600)
    keys.write_text('mail = "mail-0123456789abcdef"')
    service = '[service]\nkey_file = "keys.toml"\n'
    Path("llmaas.toml").write_text(service + CLOUD + tables)
    monkeypatch.setenv("CLOUD_KEY", key)
    said = refused("--toy", "--config", "llmaas.toml")
    assert message in said
    assert "sesame" not in said
