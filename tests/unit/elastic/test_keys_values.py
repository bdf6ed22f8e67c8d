"""Files whose levels also cut keys and values: their bytes count, and the file says so."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from elastic_models import adapters_of, elastic_of, scores_of, shuffled, write
from families import write_family
from gguf import GGMLQuantizationType

from llmaas_eval.models import Shape, write_random_model
from llmaas_hooks import ConfigError, WeightClaim
from llmaas_plugins.elastic.adapters import read_adapters, write_adapters
from llmaas_plugins.elastic.latency import latency_path
from llmaas_plugins.elastic.metadata import PREFIX, entries_of, order_in, read_elastic
from llmaas_plugins.elastic.parts import extents_of, part_claims
from llmaas_plugins.elastic.prepared_file import replace_metadata, restore, write_prepared
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.units import Widths, all_units, blocks_of, without_layers
from llmaas_plugins.model import digest
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.model.gguf_entries import entry
from llmaas_plugins.model.gguf_header import read_header

Q8_0 = GGMLQuantizationType.Q8_0
FIELDS = ["version", "levels", "step", "tables", "anchors", "calibration", "source"]
"""Fields of the JSON before keys and values could be cut."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_family("llama", tmp_path_factory.mktemp("source") / "model.gguf", weights=Q8_0)


@pytest.fixture(scope="module")
def whole(source):
    return shuffled(source, source.with_stem("whole"))


@pytest.fixture(scope="module")
def cut(source):
    return shuffled(source, source.with_stem("cut"), cuts_keys_values=True)


def field(path):
    return json.loads(read_header(path).fields[PREFIX])


def test_cells_of_cut_files_are_those_of_another_model(source, whole, cut):
    """A file without the option must not read the zeros that narrow levels of a cut one left."""
    assert file_digest(cut) != file_digest(whole)
    again = shuffled(source, source.with_stem("again"), cuts_keys_values=True)
    deque(replace_metadata(again, read_elastic(again)), maxlen=0)
    assert file_digest(again) == file_digest(cut)


@pytest.mark.parametrize("text", [None, 3, "", "[1]", '{"cuts_keys_values": 1}', "[" * 100_000])
def test_odd_metadata_cuts_nothing(text):
    assert not digest._cuts_cells(SimpleNamespace(fields={PREFIX: text}))


def bytes_of(path, *names):
    """Return the bytes of these matrices in all layers."""
    tensors = read_header(path).tensors.items()
    return sum(
        one.n_bytes
        for name, one in tensors
        if name.startswith("blk.") and name.split(".")[2] in names
    )


# -- bytes ---------------------------------------------------------------------------------------


def test_bytes_of_keys_and_values_count_if_they_are_cut(source):
    whole, cut = blocks_of(source), blocks_of(source, cuts_keys_values=True)
    keys_values = bytes_of(source, "attn_k", "attn_v")
    assert sum(whole.key_value_bytes) * whole.n_groups == keys_values
    assert cut.n_bytes == pytest.approx(whole.n_bytes + keys_values)
    units = Widths(*(np.array([[1, 2], [128, 512]], np.int32)))  # of 2 groups and 512 neurons
    attention = bytes_of(source, "attn_q", "attn_output"), bytes_of(source, "attn_k", "attn_v")
    neurons = bytes_of(source, "ffn_gate", "ffn_up", "ffn_down")
    used = 3 / 4 * sum(attention) + 5 / 8 * neurons
    assert cut.share(units) == pytest.approx(used / cut.n_bytes)
    assert whole.share(units) == pytest.approx(
        (3 / 4 * attention[0] + 5 / 8 * neurons) / whole.n_bytes
    )


def test_shares_of_all_that_is_computed(source):
    whole, cut = blocks_of(source), blocks_of(source, cuts_keys_values=True)
    assert cut.computed_share(0.2) == 0.2
    assert whole.computed_share(1.0) == cut.computed_share(1.0) == 1
    keys_values = bytes_of(source, "attn_k", "attn_v") / cut.n_bytes
    assert whole.computed_share(0.0) == pytest.approx(keys_values)
    assert whole.computed_share(0.2) == pytest.approx(0.2 + 0.8 * keys_values)
    assert whole.share(all_units(whole)) == cut.share(all_units(cut)) == 1
    assert cut.share(without_layers(cut, (0, 1))) == 0


@pytest.mark.parametrize(("n_embd", "granule"), [(128, 1), (80, 2), (72, 4)])
def test_heads_are_left_out_in_whole_groups_of_eight_rows(tmp_path, n_embd, granule):
    """Repacked matrices can only be cut there; heads have 32, 20 and 18 rows."""
    shape = Shape(n_layer=1, n_embd=n_embd, n_head=4, n_head_kv=4, n_ff=64, n_ctx=512)
    path = write_random_model(tmp_path / "model.gguf", shape, GGMLQuantizationType.F16)
    assert blocks_of(path).group_granule == 1
    assert blocks_of(path, cuts_keys_values=True).group_granule == granule


# -- claims --------------------------------------------------------------------------------------


def test_rows_of_keys_and_values_are_claimed_by_heads(source):
    blocks = blocks_of(source, cuts_keys_values=True)
    half = Widths(*(np.array([[1, 2], [256, 256]], np.int32)))
    levels = [all_units(blocks), half]
    found = extents_of(blocks, levels)
    for name in ("attn_k", "attn_v"):
        assert found[f"blk.0.{name}.weight"] == (None, 64)
        assert found[f"blk.1.{name}.weight"] == (None, None)
    assert found["blk.0.attn_q.weight"] == (None, 128)
    claims = part_claims(blocks, levels)
    assert WeightClaim(r"blk\.0\.attn_v\.weight", rows=(None, 64)) in claims
    plain = part_claims(blocks_of(source), levels)
    assert [one for one in claims if ".attn_k" in one.pattern or ".attn_v" in one.pattern] == [
        one for one in claims if one not in plain
    ]


# -- metadata ------------------------------------------------------------------------------------


def test_a_file_says_that_its_levels_cut_keys_and_values(source, whole, cut):
    found = read_elastic(cut)
    assert found.blocks == blocks_of(source, cuts_keys_values=True)
    assert read_elastic(whole).blocks == blocks_of(source)
    assert list(field(whole)) == FIELDS
    assert list(field(cut)) == [*FIELDS, "cuts_keys_values"]
    for level, widths in zip(found.levels[:6], found.tables["uniform"], strict=False):
        assert level - 0.2 < found.blocks.share(widths) <= level


def test_files_with_whole_keys_and_values_are_written_as_before(source):
    elastic = elastic_of(blocks_of(source))
    order = order_by(elastic.blocks, scores_of(elastic.blocks))
    table = elastic.tables["uniform"]
    text = {
        "version": 1,
        "levels": list(elastic.levels),
        "step": elastic.step,
        "tables": {
            "uniform": {
                "groups": [one.groups.tolist() for one in table],
                "neurons": [one.neurons.tolist() for one in table],
            }
        },
        "anchors": [],
        "calibration": {"sha256": "0" * 64, "seed": 0, "n_tokens": 0, "method": "random"},
        "source": None,
    }
    expected = json.dumps(text, separators=(",", ":"))
    assert entries_of(elastic, order) == [
        entry(PREFIX, expected),
        entry(f"{PREFIX}.groups", order.groups),
        entry(f"{PREFIX}.neurons", order.neurons),
    ]


@pytest.mark.parametrize("value", [1, "true", None, [], 0.0])
def test_impossible_answers_are_refused(cut, tmp_path, value):
    with pytest.raises(ConfigError, match="prepared by another version, or is damaged"):
        read_elastic(changed(cut, tmp_path / "hostile.gguf", cuts_keys_values=value))


def test_widths_between_whole_rows_are_refused(tmp_path):
    shape = Shape(n_layer=1, n_embd=80, n_head=4, n_head_kv=4, n_ff=64, n_ctx=512)
    source = write_random_model(tmp_path / "model.gguf", shape, GGMLQuantizationType.F16)
    path = shuffled(source, tmp_path / "prepared.gguf", cuts_keys_values=True)
    tables = field(path)["tables"]
    assert [widths[0] for widths in tables["uniform"]["groups"]][-1] == 2
    tables["uniform"]["groups"][-1] = [1]
    hostile = changed(path, tmp_path / "hostile.gguf", tables=tables)
    with pytest.raises(ConfigError, match="'uniform' has impossible widths"):
        read_elastic(hostile)
    read_elastic(changed(path, tmp_path / "hostile.gguf", tables=tables, cuts_keys_values=False))


def changed(path, target, **fields):
    """Write a prepared file with other values in its JSON."""
    header, content = read_header(path), path.read_bytes()
    first, last = header.spans[PREFIX]
    text = entry(PREFIX, json.dumps(field(path) | fields))
    start = content[:first] + text + content[last : header.infos_end]
    target.write_bytes(start + bytes(-len(start) % 32) + content[header.data_at :])
    return target


# -- the commands' parts -------------------------------------------------------------------------


def test_the_source_is_restored(source, cut, tmp_path):
    write(restore(cut, tmp_path / "restored.gguf"))
    assert (tmp_path / "restored.gguf").read_bytes() == source.read_bytes()


def test_metadata_is_replaced(source, tmp_path):
    path = shuffled(source, tmp_path / "cut.gguf", cuts_keys_values=True)
    elastic = read_elastic(path)
    tables = dict(elastic.tables) | {"searched": elastic.tables["uniform"]}
    write(replace_metadata(path, replace(elastic, tables=tables)))
    found = read_elastic(path)
    assert set(found.tables) == {"uniform", "searched"}
    assert found.blocks.cuts_keys_values
    assert order_in(read_header(path), found.blocks).groups.shape == (2, 2)


def test_adapters_are_of_the_same_matrices(source, tmp_path):
    path = shuffled(source, tmp_path / "cut.gguf", cuts_keys_values=True)
    elastic = read_elastic(path)
    write(write_adapters(path, "uniform", adapters_of(elastic.blocks, levels=[8])))
    found = read_adapters(path, read_elastic(path), "uniform")
    matrices = {name.split(".")[2] for name in found[8]}
    assert matrices == {"attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}
    one = next(iter(adapters_of(elastic.blocks, levels=[8])[8].values()))
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_k\.weight cannot have adapters"):
        write(write_adapters(path, "uniform", {8: {"blk.0.attn_k.weight": one}}))


def test_times_are_kept_apart(source, tmp_path):
    """The same widths take less time if they cut keys and values."""
    paths = [tmp_path / name for name in ("whole.gguf", "cut.gguf")]
    elastic = elastic_of(blocks_of(source))
    order = order_by(elastic.blocks, scores_of(elastic.blocks))
    for path, is_cut in zip(paths, (False, True), strict=True):
        blocks = blocks_of(source, cuts_keys_values=is_cut)
        write(write_prepared(source, path, replace(elastic, blocks=blocks), order))
    first, second = (latency_path(path, "uniform") for path in paths)
    assert first != second
