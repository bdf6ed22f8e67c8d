"""The study of memory and time: configurations, low-bit files, bytes of levels, and the table."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from llmaas_eval.elastic.engine import FULL, Variant, opened
from llmaas_eval.elastic.prepared import write_uniform
from llmaas_eval.elastic.scores import random_scores
from llmaas_eval.models import Shape, write_random_model
from llmaas_eval.pareto import plots, report
from llmaas_eval.pareto.cases import Case, Choices, cases
from llmaas_eval.pareto.quality import quality
from llmaas_eval.pareto.speed import level_share, speeds
from llmaas_eval.pareto.types import TYPES, bits_of, bytes_of, flat_importance, typed
from llmaas_eval.sparse.ours import with_channels
from llmaas_hooks import LlmaasError
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.elastic.units import blocks_of

SMALL = Shape(n_layer=1, n_embd=256, n_head=2, n_head_kv=1, n_ff=256, n_ctx=512)
WINDOWS = np.random.default_rng(0).integers(300, 4000, (2, 32))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("pareto") / "f16.gguf"
    return write_random_model(path, SMALL, GGMLQuantizationType.F16)


def test_the_first_case_is_the_whole_model_and_streams_need_shares():
    found = list(cases(Choices()))
    assert found[0] == Case("llama.cpp", "F16", "F16", {})
    assert len({(one.family, one.setting) for one in found}) == len(found)
    assert {one.family for one in found} == {
        "llama.cpp", "exact", "sparse", "sparse, distilled", "level", "level with adapter",
        "LLM-Pruner",
    }  # fmt: skip
    streamed = [one for one in found if one.share is not None]
    assert all(one.setting.endswith("in memory") for one in streamed)
    few = list(cases(Choices(("Q4_0",), (), (0.5,), (0.5,), with_pruned=False)))
    assert not any(one.share for one in few)
    assert [one.family for one in few] == [
        "llama.cpp", "llama.cpp", "sparse", "sparse, distilled", "level", "level with adapter",
    ]  # fmt: skip


@pytest.mark.slow
def test_types_have_fewer_bits_one_after_the_other(source, tmp_path):
    weights = flat_importance(source)
    paths = [typed(source, tmp_path / f"{name}.gguf", name, weights, 1) for name in TYPES]
    bits = [bits_of(path) for path in paths]
    assert bits_of(source) == pytest.approx(16, rel=0.01)
    assert bits[0] == pytest.approx(8.5, rel=0.02)
    assert bits[2:] == sorted(bits[2:], reverse=True)
    found = [
        {tensor.tensor_type.name for tensor in GGUFReader(path).tensors if "blk" in tensor.name}
        for path in paths
    ]
    assert all(name in kinds for name, kinds in zip(TYPES, found, strict=True))
    before = paths[1].stat().st_mtime_ns
    assert typed(source, paths[1], "Q4_0", weights, 1).stat().st_mtime_ns == before
    assert not [*tmp_path.glob("*.partial")]


def test_importance_counts_and_is_needed_for_two_bits(source, tmp_path):
    weights = flat_importance(source)
    some = {name: values * (np.arange(len(values)) < 32) for name, values in weights.items()}
    flat, uneven = (
        typed(source, tmp_path / f"{number}.gguf", "Q2_K", each, 1).read_bytes()
        for number, each in enumerate((weights, some))
    )
    assert flat != uneven
    with pytest.raises(LlmaasError, match="llama_model_quantize returned"):
        typed(source, tmp_path / "none.gguf", "IQ2_XS", {}, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"0.gguf", "1.gguf"}


def test_a_level_alone_has_the_bytes_of_its_units(source, tmp_path):
    path = tmp_path / "levels.gguf"
    write_uniform(source, path, random_scores(blocks_of(source), 0))
    assert level_share(path, 1.0) == 1.0
    blocks, elastic = blocks_of(path), read_elastic(path)
    widths = elastic.tables["uniform"][elastic.levels.index(0.5)]
    n_less = (blocks.n_groups - int(widths.groups[0])) * blocks.group_bytes[0]
    n_less += (blocks.n_ff - int(widths.neurons[0])) * blocks.neuron_bytes[0]
    expected = (bytes_of(path) - n_less) / bytes_of(path)
    assert level_share(path, 0.5) == pytest.approx(expected)
    assert expected < 1


def test_losses_are_those_of_the_tokens_after_the_prompt(source, tmp_path):
    files = {"F16": source, "levels": tmp_path / "levels.gguf"}
    write_uniform(source, files["levels"], random_scores(blocks_of(source), 0))
    found = quality(files, Case("llama.cpp", "F16", "F16", {}), WINDOWS, 8)
    with opened(Variant(source), n_ctx=32) as (reader,):
        for window, nats in zip(WINDOWS, found, strict=True):
            log_p = reader.log_p(window[:-1].astype(np.int32), FULL)
            own = -log_p[np.arange(8, 31), window[9:]]
            assert nats == pytest.approx(own.mean(), rel=1e-3)  # the engine has other batches
    half = Case("level", "50 %", "levels", {"elastic": {"adapters": False}}, level=0.5)
    assert quality(files, half, WINDOWS, 8) != pytest.approx(found, rel=1e-4)
    whole = half._replace(level=1.0)
    assert quality(files, whole, WINDOWS, 8) == pytest.approx(found, rel=1e-3)


@pytest.mark.slow
def test_configurations_are_timed_with_their_memory(source, tmp_path):
    base = typed(source, tmp_path / "Q4_0.gguf", "Q4_0", {}, 1)
    (tmp_path / "sparse").mkdir()
    sparse = with_channels(base, tmp_path / "sparse", WINDOWS)
    levels = write_uniform(base, tmp_path / "levels.gguf", random_scores(blocks_of(base), 0))
    table = {"mode": "sparse", "sparsity": 0.5, "selection": "top_k"}
    asked = [
        Case("llama.cpp", "Q4_0", "Q4_0", {}),
        Case("sparse", "50 %", "equal", {"flash_weights": table}),
        Case("level", "50 %", "levels", {"elastic": {"adapters": False}}, level=0.5),
    ]
    found = speeds({"Q4_0": base, "equal": sparse, "levels": levels}, asked, 2)
    assert [len(one.ms) for one in found] == [2, 2, 2]
    assert found[0].memory == 1.0
    assert 0.1 < found[1].memory < 1.0  # embeddings stay in the file
    assert found[2].memory == level_share(levels, 0.5)


def row(family, setting, nats, memory, ms):
    return {
        "family": family, "setting": setting, "bits": 4.5, "memory": memory,
        "nats": [nats, nats + 0.1], "ms": ms,
    }  # fmt: skip


ROWS = [
    row("llama.cpp", "F16", 2.0, 1.0, [9.0, 8.0, 10.0]),
    row("exact", "50 % in memory", 2.1, 0.15, [30.0, 40.0, 50.0]),
    row("sparse", "50 % left out, 50 % in memory", 2.2, 0.15, [20.0, 20.0, 20.0]),
]


def test_the_table_compares_with_the_whole_model():
    table = report.TABLES["sparse-pareto"]([{"rows": ROWS}])
    assert [list(line) for line in table.rows] == [
        ["llama.cpp", "F16", "4.50", "100.0", "7.77", "1.000 (1.000–1.000)", "8.0", "9.0"],
        ["exact", "50 % in memory", "4.50", "15.0", "8.58", "1.105 (1.105–1.105)", "30.0", "40.0"],
        [
            "sparse", "50 % left out, 50 % in memory", "4.50", "15.0", "9.49",
            "1.221 (1.221–1.221)", "20.0", "20.0",
        ],
    ]  # fmt: skip
    assert "| exact | 50 % in memory |" in report.report({"rows": ROWS})
    with pytest.raises(ValueError, match="no rows"):
        report.TABLES["sparse-pareto"]([{"rows": []}])


def test_the_picture_is_drawn(tmp_path):
    plots.draw(ROWS, tmp_path)
    assert (tmp_path / "sparse-pareto.png").stat().st_size > 10_000
