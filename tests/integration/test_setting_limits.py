"""Settings of absurd sizes: refused in one line, or good for a whole life of an engine."""

from __future__ import annotations

import contextlib
import math
import typing

import pytest
from datastores import ENGINE, stored
from gguf import GGMLQuantizationType
from llama_cpp import Llama
from pydantic import ByteSize

from llmaas_eval.models import Shape, write_random_model
from llmaas_hooks import BudgetError, ConfigError, PluginError
from llmaas_plugins import activate, load_config
from llmaas_plugins.config import ServiceConfig, validated
from llmaas_plugins.elastic.config import ElasticConfig
from llmaas_plugins.flash_weights.config import FlashWeightsConfig
from llmaas_plugins.knn_lm.config import KnnLMConfig
from llmaas_plugins.kv_chunks.config import KVChunksConfig
from llmaas_plugins.service.service import LLMService

MODELS = {
    "kv_chunks": KVChunksConfig,
    "knn_lm": KnnLMConfig,
    "elastic": ElasticConfig,
    "flash_weights": FlashWeightsConfig,
    "service": ServiceConfig,
}
NO_NUMBERS = (math.inf, -math.inf, math.nan)
ABSURD = (2**31, 2**40, 2**52, 2**63 - 1, 2**63, 2**70, 10**400, -1, -(2**70), 1e-300, 1e308)
WRITTEN = ("9" * 5000, "1e400", "nan", "-inf", "-0", "1e-400", "0x10")


def numeric(model):
    """Yield the names of a model's settings that are numbers."""
    for name, field in model.model_fields.items():
        kinds = {field.annotation, *typing.get_args(field.annotation)}
        if kinds & {int, float, ByteSize}:
            yield name


SETTINGS = [(name, key) for name, model in MODELS.items() for key in numeric(model)]


def settings(name, key, value):
    """Return a plugin's or the service's validated settings with one value."""
    if name == "service":
        return load_config({"service": {key: value}}, {}).service
    table = load_config({"plugins": {name: {key: value}}}, {}).plugins[name]
    return validated(name, MODELS[name], table)


def accepted(name, key):
    """Return the odd values of a setting that are accepted, and the bounds that it names."""
    bounds = [
        getattr(one, bound)
        for one in MODELS[name].model_fields[key].metadata
        for bound in ("ge", "le")
        if hasattr(one, bound)
    ]
    found = []
    for value in dict.fromkeys((*ABSURD, *bounds)):
        with contextlib.suppress(ConfigError):
            settings(name, key, value)
            found.append(value)
    return found


def assert_line(error, part):
    """Assert that an error is one readable line with this part."""
    text = str(error)
    assert part in text
    assert "\n" not in text
    assert len(text) < 6000  # it shows the value


@pytest.mark.parametrize(("name", "key"), SETTINGS)
def test_absurd_numbers_are_refused_in_one_line(name, key):
    for value in (*NO_NUMBERS, *ABSURD, *WRITTEN):
        found, refusal = 0, None
        try:
            found = getattr(settings(name, key, value), key)
        except ConfigError as error:
            refusal = error
        if refusal is not None:
            assert_line(refusal, f"{key}: ")
        assert -(2**63) <= found < 2**63
        assert math.isfinite(found)


def test_every_kind_of_number_is_found():
    keys = {key for _, key in SETTINGS}
    assert keys >= {"size", "idle_s", "alpha", "ram_budget", "queue_depth", "client_timeout_s"}


def lives(name):
    """Yield settings of which each has an odd value, until all accepted ones were in one."""
    values = {key: accepted(name, key) for key in numeric(MODELS[name])}
    values.pop("ram_budget", None)  # below
    values = {key: found for key, found in values.items() if found}
    for i in range(max(map(len, values.values()))):
        yield {key: found[i % len(found)] for key, found in values.items()}


LIVES = [
    pytest.param(name, one, id=f"{name} {i}")
    for name in MODELS
    for i, one in enumerate(lives(name))
]


def live(plugins, model, service=None):
    """Activate, and use an engine, or a service on it."""
    with (
        activate({"on_error": "raise", "plugins": plugins}) as suite,
        contextlib.closing(Llama(str(model), **ENGINE)) as llama,
    ):
        llama.create_completion("The quick brown fox jumps over the lazy dog", max_tokens=2)
        suite.settle()
        if service is not None:
            with LLMService(llama, service) as opened:
                opened.bind("app").new_context().call("Hi", max_tokens=1)
        assert suite.status()["errors"] == {}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Return a model with so small cells that as many fit into memory as can be asked for."""
    shape = Shape(n_layer=1, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_ctx=1024)
    path = tmp_path_factory.mktemp("narrow") / "model.gguf"
    return write_random_model(path, shape, GGMLQuantizationType.Q8_0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), LIVES)
def test_accepted_numbers_serve_an_engine(name, values, reference_model, narrow, tmp_path):
    if name == "service":
        plugins = {"kv_chunks": {"store": str(tmp_path / "kv")}}
        live(plugins, reference_model, ServiceConfig(state_dir=tmp_path / "state", **values))
        return
    store = tmp_path / name
    if name == "knn_lm":
        stored(reference_model).write(store)
        values = {"learn": True, "drafts": True} | values
    has_store = "store" in MODELS[name].model_fields
    model = narrow if name == "kv_chunks" else reference_model
    live({name: ({"store": str(store)} if has_store else {}) | values}, model)


@pytest.mark.parametrize("value", accepted("kv_chunks", "ram_budget"))
def test_more_memory_than_there_is_serves_or_is_refused(value, reference_model, tmp_path):
    table = {"store": str(tmp_path), "ram_budget": value}
    refusal = None
    try:
        live({"kv_chunks": table}, reference_model)
    except PluginError as error:
        refusal = error
    if refusal is not None:
        assert isinstance(refusal.__cause__, BudgetError)
        assert_line(refusal, "Lower plugins.kv_chunks.ram_budget")
