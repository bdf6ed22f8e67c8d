"""elastic: what a level computes, with other plugins and without a prepared model."""

from __future__ import annotations

import contextlib
import shutil
import sys

import fork_server
import numpy as np
import pytest
from families import write_family
from flash_apps import run
from leveled import TENTHS, Recorder, answered, report
from matrices import zeroed
from preparing import prepare
from restoring import lose
from switching import ENDINGS, OTHER, PROMPT, ask

from llmaas_eval.families import write_lora
from llmaas_eval.models import SHAPE_TINY, write_random_model
from llmaas_hooks import ConfigError, PluginError, WeightClaim, hookimpl
from llmaas_plugins import activate, elastic
from llmaas_plugins.elastic.metadata import read_elastic

CHANGED = "searched", True
"""The table and the setting that have biases."""


# -- what levels compute -------------------------------------------------------------------------


def test_the_whole_model_is_the_prepared_file_without_us(narrowing, engine):
    with contextlib.closing(engine()) as llama:
        expected = answered(llama)
    suite = narrowing()
    llama = engine()
    assert np.array_equal(answered(llama), expected)
    with elastic.level(0.5):
        assert np.abs(answered(llama) - expected).max() > 0.1
    assert np.array_equal(answered(llama), expected)
    suite.deactivate()
    assert np.array_equal(answered(llama), expected)


def test_a_level_is_the_model_without_the_units_that_it_leaves_out(
    narrowing, engine, model, tmp_path
):
    """The expected logits are stock llama.cpp's with zeros in the left-out units' weights."""
    found = read_elastic(model)
    widths = found.tables["uniform"][TENTHS.index(0.4)]
    columns = int(widths.groups[0]) * found.blocks.group_width
    result = r"blk\.\d+\.attn_output\.weight"
    heads = zeroed(model, tmp_path / "heads.gguf", result, columns=columns)
    neurons = int(widths.neurons[0])
    narrow = zeroed(heads, tmp_path / "narrow.gguf", r"blk\.\d+\.ffn_up\.weight", rows=neurons)
    with contextlib.closing(engine(narrow)) as llama:
        expected = answered(llama)
    narrowing(level=0.4)
    np.testing.assert_allclose(answered(engine()), expected, atol=2e-3)


def test_compensation_is_a_setting(narrowing, engine):
    found = {}
    for table, compensate in (("uniform", True), ("searched", True), ("searched", False)):
        suite = narrowing(level=0.6, table=table, compensate=compensate)
        with contextlib.closing(engine()) as llama:
            found[table, compensate] = answered(llama)
            (one,) = report(suite)["models"].values()
            assert (one["table"], one["compensated"]) == (table, (table, compensate) == CHANGED)
            with elastic.level(1.0):
                found[compensate] = answered(llama)
    assert np.array_equal(found[True], found[False])
    assert np.array_equal(found["uniform", True], found["searched", False])
    assert np.abs(found[CHANGED] - found["searched", False]).max() > 0.1


# -- what goes with it ---------------------------------------------------------------------------


def test_a_context_goes_on_at_another_level_from_the_disk(narrowing, engine, tmp_path):
    """With exact chunks the logits are those of the engine's own cells."""
    settings = {"n_ubatch": 1, "flash_attn": True}
    kept = {"codec": "lossless", "recompute": False, "store": str(tmp_path / "kv")}
    narrowing()
    with contextlib.closing(engine(**settings)) as llama:
        with elastic.level(0.4):
            answer, _ = ask(llama, PROMPT, 4)
        longer = [*PROMPT, *answer[:-1], *ENDINGS[0]]
        _, expected = ask(llama, longer, 4)
        llama.reset()
        _, anew = ask(llama, longer, 4)
    assert np.abs(anew - expected).max() > 0.1
    narrowing(plugins={"kv_chunks": kept})
    with contextlib.closing(engine(**settings)) as llama, elastic.level(0.4):
        assert ask(llama, PROMPT, 4)[0] == answer
        ask(llama, OTHER, 1)
    suite = narrowing(plugins={"kv_chunks": kept})
    _, found = ask(engine(**settings), longer, 4)
    assert suite.status()["plugins"]["kv_chunks"]["disk_hits"] > 0
    assert np.array_equal(found, expected)


def test_what_is_computed_again_has_the_level_of_the_prompt(narrowing, engine, tmp_path):
    recorder = Recorder()
    kept = {"codec": "lossless", "recompute": False, "store": str(tmp_path / "kv")}
    suite = narrowing(recorder, plugins={"kv_chunks": kept})
    llama = engine()
    for prompt in (PROMPT, OTHER):
        ask(llama, prompt, 1)
    lose(suite, llama, PROMPT, [5])  # beyond the common beginning
    recorder.taken(llama)
    with elastic.level(prefill=0.4, decode=0.8):
        ask(llama, PROMPT, 2)
    *computed, (share, n) = recorder.taken(llama)
    assert (share, n) == (0.8, 1)
    assert {share for share, _ in computed} == {0.4}
    assert (0.4, 16) in computed


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_weights_that_are_streamed_have_levels(reference_model, tmp_path, is_cut):
    """Levels leave keys and values whole, or cut them."""
    path = prepare(reference_model, tmp_path / "model.gguf", cuts_keys_values=is_cut)
    script = """
from llmaas_plugins import elastic
own = {"table": "uniform", "level": 0.5, "drafts": False}
llama_cpp.llama_model_default_params = unrepacked
with activate({"on_error": "raise", "plugins": {"elastic": own}}):
    _, llama = app()
    expected = tokens(llama, 12)
    llama.close()
table = {"memory_budget": resident_bytes() + 40 * MIB, "arena": 8 * MIB, "mode": "exact"}
plugins = {"elastic": own, "flash_weights": table}
with activate({"on_error": "raise", "plugins": plugins}) as suite:
    llama = Llama(path, n_ctx=256, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
    found = tokens(llama, 12)
    with elastic.level(1.0):
        whole = tokens(llama, 12)
    print(json.dumps([expected, found, whole, suite.status()["plugins"]]))
"""
    expected, found, whole, status = run(path, script)
    assert status["flash_weights"]["mode"] == "exact"
    assert found == expected != whole
    assert status["elastic"]["tokens"]["0.5"] == status["elastic"]["tokens"]["1.0"]


def test_an_adapter_is_told_of_once(narrowing, engine, tmp_path, caplog):
    lora = write_lora("llama", tmp_path / "lora.gguf")
    model = prepare(write_family("llama", tmp_path / "model.gguf"), tmp_path / "prepared.gguf")
    narrowing()
    for adapter in (None, str(lora), str(lora)):
        answered(engine(model, lora_path=adapter), 1)
    (line,) = [line for line in caplog.messages if "LoRA" in line]
    assert str(model) in line


# -- what cannot be ------------------------------------------------------------------------------


def test_a_model_that_was_not_prepared_is_left_alone(narrowing, make, reference_model, caplog):
    with contextlib.closing(make()) as llama:
        expected = answered(llama)
    suite = narrowing(level=0.5)
    for _ in range(2):
        llama = make()
        assert np.array_equal(answered(llama), expected)
    (line,) = [line for line in caplog.messages if "has no levels" in line]
    assert f"`llmaas elastic prepare {reference_model}`" in line
    found = report(suite)
    assert (found["mode"], found["left_alone"]) == ("off", [line])
    with (
        elastic.level(0.5),
        pytest.raises(
            PluginError, match=r"cannot use the requested level.*`llmaas elastic prepare"
        ),
    ):
        answered(llama)


def test_a_model_that_takes_the_place_of_a_prepared_one(narrowing, engine, model, reference_model):
    path = shutil.copyfile(model, model.with_stem("replaced"))
    suite = narrowing(level=0.4)
    engine(path).close()
    shutil.copyfile(reference_model, path)
    engine(path)
    assert report(suite)["mode"] == "off"
    shutil.copyfile(model, path)
    engine(path)
    assert (report(suite)["mode"], report(suite)["left_alone"]) == ("elastic", [])


def test_levels_that_the_engine_cannot_use(narrowing, engine, tmp_path, caplog):
    """Another plugin's mistake voids all claims, so the whole model cannot serve as a level."""
    suite = narrowing(Mistaken(), on_error="log", level=0.4)
    untied = write_random_model(tmp_path / "untied.gguf", SHAPE_TINY)
    answered(engine(prepare(untied, tmp_path / "prepared.gguf")))
    assert [line for line in caplog.messages if "no graph multiplies" in line]
    found = report(suite)
    assert (found["mode"], found["contexts"], found["tokens"]) == ("off", [], {})
    (line,) = found["left_alone"]
    assert "the whole model is used" in line


class Mistaken:
    @hookimpl
    def llmaas_weights(self):
        return [WeightClaim(r"token_embd\.weight", rows=(8,))]


def test_what_is_said_while_stderr_leads_nowhere_is_said_afterwards(
    narrowing, reference_model, tmp_path
):
    script = """
import sys
from llama_cpp import Llama
from llmaas_plugins import activate
with activate({"plugins": {"elastic": {}}}):
    Llama(sys.argv[1], n_ctx=64, verbose=False)
"""
    command = [sys.executable, "-c", script, reference_model]
    done = fork_server.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.count("`llmaas elastic prepare") == 1


def test_a_context_that_is_older_than_the_plugin_has_no_levels(narrowing, engine):
    llama = engine()
    narrowing(level=0.5)
    answered(llama)
    with elastic.level(0.5), pytest.raises(PluginError, match="created before `activate`"):
        answered(llama)


def test_damaged_metadata_and_tables_that_are_not_there(narrowing, engine, model, tmp_path):
    path = tmp_path / "damaged.gguf"
    content = bytearray(model.read_bytes())
    at = content.index(b'"version":1,"levels":[1.0,0.9')
    content[at + 10 : at + 11] = b"7"
    path.write_bytes(content)
    narrowing()
    with pytest.raises(PluginError, match=r"'elastic' failed in llmaas_weights: .*version"):
        engine(path)
    suite = narrowing(on_error="log", level=0.5)
    answered(engine(path))
    assert suite.status()["errors"]["elastic"]["llmaas_weights"]["count"] == 1
    assert report(suite)["mode"] == "off"


def test_a_table_that_the_file_has_not(narrowing, engine, reference_model, tmp_path):
    path = prepare(reference_model, tmp_path / "uniform.gguf")
    narrowing(table="searched")
    with pytest.raises(PluginError, match=r"has no table 'searched'; expected one of uniform"):
        engine(path)
    suite = narrowing(table=None)
    engine(path)
    assert report(suite)["models"][str(path)]["table"] == "uniform"


@pytest.mark.parametrize("wrong", [{"level": 0.1}, {"decode_level": 2}, {"table": "best"}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        activate({"plugins": {"elastic": wrong}})
