"""Adapters of levels: computed, switched, stored and streamed with everything else."""

from __future__ import annotations

import contextlib
import json
import shutil

import numpy as np
import pytest
from elastic_models import adapters_of, write
from flash_apps import run
from leveled import TENTHS, answered, report
from low_rank import matrices_of, write_lora_of
from matrices import zeroed
from switching import ENDINGS, OTHER, PROMPT, ask

from llmaas_hooks import PluginError
from llmaas_plugins import elastic
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic.adapter_index import FIELDS
from llmaas_plugins.elastic.adapters import read_adapters, write_adapters
from llmaas_plugins.elastic.metadata import read_elastic

LEVEL = 0.4


@pytest.fixture(scope="module")
def adapted(model, tmp_path_factory):
    """Return a copy of the prepared model that has adapters at all levels but one."""
    path = shutil.copy(model, tmp_path_factory.mktemp("adapted") / "model.gguf")
    levels = [i for i, level in enumerate(TENTHS) if level not in (1.0, 0.8)]
    blocks = read_elastic(path).blocks
    write(write_adapters(path, "uniform", adapters_of(blocks, levels, rank=8, size=0.1)))
    return path


def test_a_level_is_the_narrow_model_with_its_adapter(narrowing, engine, adapted, tmp_path):
    """The reference is stock llama.cpp with an adapter file on a model with zeros."""
    found = read_elastic(adapted)
    level = TENTHS.index(LEVEL)
    widths = found.tables["uniform"][level]
    columns = int(widths.groups[0]) * found.blocks.group_width
    heads = zeroed(adapted, tmp_path / "a.gguf", r"blk\.\d+\.attn_output\.weight", columns=columns)
    up, neurons = r"blk\.\d+\.ffn_(up|gate)\.weight", int(widths.neurons[0])
    narrow = zeroed(heads, tmp_path / "b.gguf", up, rows=neurons)
    terms = read_adapters(adapted, found, "uniform")[level]
    lora = write_lora_of(matrices_of(terms, adapted), tmp_path / "lora.gguf")
    with contextlib.closing(engine(narrow)) as llama:
        without = answered(llama, 1)
    with contextlib.closing(engine(narrow, lora_path=str(lora))) as llama:
        expected = answered(llama, 1)
    narrowing(level=LEVEL)
    difference = np.abs(answered(engine(adapted), 1) - expected).mean()
    assert difference < 0.03 * np.abs(without - expected).mean()


def test_adapters_are_a_setting_and_level_1_has_none(narrowing, engine, model, adapted):
    with contextlib.closing(engine()) as llama:
        vanilla = answered(llama)
    at = {}
    for path, is_on in ((model, True), (adapted, False), (adapted, True)):
        suite = narrowing(adapters=is_on)
        with contextlib.closing(engine(path)) as llama:
            assert np.array_equal(answered(llama), vanilla)
            for level in (LEVEL, 0.8):
                with elastic.level(level):
                    at[path, is_on, level] = answered(llama)
            assert np.array_equal(answered(llama), vanilla)
            (one,) = report(suite)["models"].values()
            n_bytes = path == adapted and read_elastic(path).adapters["uniform"].n_bytes
            expected = {"on": is_on, "rank": 8, "bytes": n_bytes} if path == adapted else None
            assert one["adapters"] == expected
    for level in (LEVEL, 0.8):
        assert np.array_equal(at[model, True, level], at[adapted, False, level])
    assert np.abs(at[adapted, True, LEVEL] - at[model, True, LEVEL]).max() > 0.1
    assert np.array_equal(at[adapted, True, 0.8], at[model, True, 0.8])  # which has none


def test_only_the_used_tables_adapters_are_read(narrowing, engine, adapted, tmp_path):
    path = shutil.copy(adapted, tmp_path / "damaged.gguf")
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    suite = narrowing(table="searched", level=LEVEL)
    assert np.isfinite(answered(engine(path))).all()
    assert report(suite)["models"][str(path)]["adapters"] is None


def test_levels_alternate_within_a_context(narrowing, engine, adapted):
    """Each answer continues cells of other levels, and repeats itself bit by bit."""
    narrowing()
    llama, found = engine(adapted), []
    for _ in range(2):
        llama.reset()
        tokens, rows = list(PROMPT), []
        for level in (LEVEL, 1.0, 0.3, 0.8, LEVEL):
            with elastic.level(level):
                answer, logits = ask(llama, tokens, 3)
            tokens += answer
            rows.append(logits)
        found.append(np.concatenate(rows))
    assert np.array_equal(*found)
    assert np.isfinite(found[0]).all()


def test_a_context_goes_on_at_another_level_from_the_disk(narrowing, engine, adapted, tmp_path):
    settings = {"n_ubatch": 1, "flash_attn": True}
    kept = {"codec": "lossless", "recompute": False, "store": str(tmp_path / "kv")}
    narrowing()
    with contextlib.closing(engine(adapted, **settings)) as llama:
        with elastic.level(LEVEL):
            answer, _ = ask(llama, PROMPT, 4)
        longer = [*PROMPT, *answer[:-1], *ENDINGS[0]]
        _, expected = ask(llama, longer, 4)
    narrowing(plugins={"kv_chunks": kept})
    with contextlib.closing(engine(adapted, **settings)) as llama, elastic.level(LEVEL):
        assert ask(llama, PROMPT, 4)[0] == answer
        ask(llama, OTHER, 1)
    suite = narrowing(plugins={"kv_chunks": kept})
    _, found = ask(engine(adapted, **settings), longer, 4)
    assert suite.status()["plugins"]["kv_chunks"]["disk_hits"] > 0
    assert np.array_equal(found, expected)


def test_contexts_stay_valid_when_adapters_are_added(narrowing, engine, model, adapted, tmp_path):
    path = shutil.copy(model, tmp_path / "model.gguf")
    kept = {"codec": "lossless", "recompute": False, "store": str(tmp_path / "kv")}
    narrowing(plugins={"kv_chunks": kept})
    with contextlib.closing(engine(path)) as llama:
        ask(llama, PROMPT, 1)
        ask(llama, OTHER, 1)
    shutil.copy(adapted, path)
    suite = narrowing(plugins={"kv_chunks": kept})
    ask(engine(path), PROMPT, 1)
    assert suite.status()["plugins"]["kv_chunks"]["disk_hits"] > 0


@pytest.mark.slow
def test_streamed_weights_have_adapters_within_the_budget(adapted, tmp_path):
    path = shutil.copyfile(adapted, tmp_path / "model.gguf")
    script = """
from llmaas_plugins import elastic
own = {"table": "uniform", "level": 0.4}
llama_cpp.llama_model_default_params = unrepacked
def answers(plugins):
    with activate({"on_error": "raise", "plugins": plugins}) as suite:
        llama = Llama(path, n_ctx=256, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
        found = tokens(llama, 12)
        with elastic.level(1.0):
            whole = tokens(llama, 12)
        status = suite.status()["plugins"]
        llama.close()
    return found, whole, status
table = {"memory_budget": resident_bytes() + 56 * MIB, "arena": 8 * MIB, "mode": "exact"}
_, llama = app()
vanilla = tokens(llama, 12)
llama.close()
expected, whole, _ = answers({"elastic": own})
without, _, _ = answers({"elastic": own | {"adapters": False}})
found, streamed, status = answers({"elastic": own, "flash_weights": table})
print(json.dumps([expected, found, without, vanilla == whole == streamed, status]))
"""
    expected, found, without, is_vanilla, status = run(path, script)
    assert status["flash_weights"]["mode"] == "exact"
    assert status["flash_weights"]["resident_bytes"] <= status["flash_weights"]["memory_budget"]
    assert status["elastic"]["models"][str(path)]["adapters"]["on"]
    assert found == expected != without
    assert is_vanilla


@pytest.mark.slow
def test_a_forked_child_computes_the_same(adapted):
    script = """
import os
from llmaas_plugins import elastic
with activate({"on_error": "raise", "plugins": {"elastic": {"table": "uniform", "level": 0.4}}}):
    llama = Llama(path, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    expected = tokens(llama, 8)
    read, write = os.pipe()
    if os.fork() == 0:
        llama.reset()
        os.write(write, json.dumps(tokens(llama, 8)).encode())
        os._exit(0)
    os.wait()
    print(json.dumps([expected, json.loads(os.read(read, 10000))]))
"""
    expected, found = run(adapted, script)
    assert found == expected


def test_adapters_of_other_widths_leave_the_whole_model(narrowing, engine, adapted, tmp_path):
    path, content = tmp_path / "other.gguf", bytearray(adapted.read_bytes())
    at = content.index(b'"widths":"', content.index(FIELDS[0].encode())) + 10
    content[at : at + 8] = b"01234567"
    path.write_bytes(content)
    narrowing()
    with pytest.raises(PluginError, match=r"for other widths .*`adapters = false`"):
        engine(path)
    suite = narrowing(on_error="log", level=LEVEL)
    answered(engine(path))
    assert suite.status()["errors"]["elastic"]["llmaas_weights"]["count"] == 1
    assert report(suite)["mode"] == "off"
    suite = narrowing(adapters=False, level=LEVEL)
    answered(engine(path))
    assert report(suite)["mode"] == "elastic"


def test_show_says_which_tables_have_adapters(adapted, capsys):
    n_bytes = read_elastic(adapted).adapters["uniform"].n_bytes
    assert main(["elastic", "show", str(adapted)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"uniform, adapters of rank 8 ({n_bytes / 1e6:.1f} MB)" in lines
    assert "searched, compensated" in lines
    assert main(["elastic", "show", str(adapted), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert tables["uniform"]["adapters"] == {"rank": 8, "bytes": n_bytes}
    assert tables["searched"]["adapters"] is None
