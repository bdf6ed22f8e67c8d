"""Prepared files: written whole or not at all; nothing in them is trusted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest
from damages import FOREIGN, ODD, each, flip
from elastic_models import elastic_of, scores_of, shuffled, write
from families import write_family
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from llmaas_hooks import ConfigError, LlmaasError, StoreError
from llmaas_plugins.cli.main import main
from llmaas_plugins.elastic.metadata import PREFIX, Source, order_in, read_elastic
from llmaas_plugins.elastic.prepared_file import restore, write_prepared
from llmaas_plugins.elastic.reordering import Move, Order, check_order, moved, order_by
from llmaas_plugins.elastic.units import blocks_of
from llmaas_plugins.model.gguf_entries import entry
from llmaas_plugins.model.gguf_header import read_header

Q8_0 = GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_family("llama", tmp_path_factory.mktemp("source") / "model.gguf", weights=Q8_0)


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory):
    return shuffled(source, tmp_path_factory.mktemp("prepared") / "prepared.gguf")


def test_a_header_is_what_other_readers_find(prepared):
    header, reader = read_header(prepared), GGUFReader(prepared)
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        place = header.tensors[tensor.name]
        assert (place.at, place.n_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert (place.type, place.shape) == (tensor.tensor_type, tuple(tensor.shape))
    assert list(header.fields) == [key for key in reader.fields if not key.startswith("GGUF.")]
    for key, value in header.fields.items():
        expected = reader.fields[key].contents()
        if isinstance(value, np.ndarray):
            assert value.tolist() == expected
        elif value is None:
            assert isinstance(expected[0], str)
        else:
            assert value == expected


def test_what_was_prepared_is_read_back(source, prepared):
    blocks = blocks_of(source)
    expected, found = elastic_of(blocks), read_elastic(prepared)
    assert found.blocks == blocks
    assert found.levels == expected.levels
    for level, widths in zip(expected.tables["uniform"], found.tables["uniform"], strict=True):
        np.testing.assert_array_equal(widths.groups, level.groups)
        np.testing.assert_array_equal(widths.neurons, level.neurons)
    assert found.calibration == expected.calibration
    assert found.source.n_bytes == source.stat().st_size
    order = order_by(blocks, scores_of(blocks))
    np.testing.assert_array_equal(order_in(read_header(prepared), blocks).neurons, order.neurons)
    assert read_elastic(source) is None


def test_biases_are_read_back_by_weight(source, tmp_path):
    blocks = blocks_of(source)
    elastic = elastic_of(blocks)
    shape = len(elastic.levels), blocks.n_layers, 2, blocks.n_embd
    biases = np.random.default_rng(0).normal(0, 1, shape).astype(np.float16)
    elastic = replace(elastic, biases={"uniform": biases})
    write(write_prepared(source, tmp_path / "a.gguf", elastic, order_by(blocks, scores_of(blocks))))
    found = read_elastic(tmp_path / "a.gguf").biases_of("uniform")
    assert len(found) == 2 * blocks.n_layers
    np.testing.assert_array_equal(found["blk.1.ffn_down.weight"], biases[:, 1, 1])
    np.testing.assert_array_equal(found["blk.0.attn_output.weight"], biases[:, 0, 0])
    assert read_elastic(tmp_path / "a.gguf").biases_of("searched") == {}


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 4, 34]), st.randoms())
def test_moves_take_rows_and_pieces_from_elsewhere(n_rows, n_pieces, n_bytes, random):
    old = np.frombuffer(random.randbytes(n_rows * n_pieces * n_bytes), np.uint8)
    rows, pieces = (np.array(random.sample(range(n), n), np.intp) for n in (n_rows, n_pieces))
    new = np.concatenate(list(moved(old, Move(n_rows, rows, pieces))))
    expected = old.reshape(n_rows, n_pieces, n_bytes)[rows][:, pieces]
    np.testing.assert_array_equal(new.reshape(expected.shape), expected)


@pytest.mark.parametrize("alignment", [8, 256])
def test_what_is_between_and_behind_tensors_is_kept(tmp_path, alignment):
    source = model_with(tmp_path / "source.gguf", alignment=alignment)
    with source.open("ab") as file:
        file.write(b"something else")
    header = read_header(source)
    path = shuffled(source, tmp_path / "prepared.gguf")
    for name, place in read_header(path).tensors.items():
        assert place.at % alignment == 0
        assert (place.shape, place.type) == (header.tensors[name].shape, header.tensors[name].type)
    write(restore(path, tmp_path / "restored.gguf"))
    assert (tmp_path / "restored.gguf").read_bytes() == source.read_bytes()


# -- writing -------------------------------------------------------------------------------------


def test_a_full_disk_leaves_what_was_there(source, tmp_path, monkeypatch):
    path, n_left, pwrite = tmp_path / "a.gguf", [3], os.pwrite
    path.write_bytes(b"the one before")

    def refuse(fd, data, at):
        n_left[0] -= 1
        if n_left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(StoreError, match=r"cannot write .*a\.gguf: No space left on device"):
        shuffled(source, path)
    assert path.read_bytes() == b"the one before"
    assert list(tmp_path.iterdir()) == [path]


def test_stopped_it_leaves_nothing(source, tmp_path):
    blocks = blocks_of(source)
    order = order_by(blocks, scores_of(blocks))
    writing = write_prepared(source, tmp_path / "a.gguf", elastic_of(blocks), order)
    next(writing)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf.partial"]
    writing.close()
    assert not list(tmp_path.iterdir())


def test_what_is_read_is_not_written_to(source, tmp_path):
    path = tmp_path / "link.gguf"
    path.symlink_to(source)
    with pytest.raises(ConfigError, match="cannot replace the file that it is made from"):
        shuffled(source, path)


def test_a_damaged_file_is_not_restored(prepared, tmp_path):
    path = shutil.copy(prepared, tmp_path / "damaged.gguf")
    flip(path, path.stat().st_size - 5)
    with pytest.raises(StoreError, match="is damaged: the restored bytes differ"):
        write(restore(path, tmp_path / "restored.gguf"))
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_not_prepared_or_quantized_since_is_not_restored(source, tmp_path):
    with pytest.raises(ConfigError, match="is not a prepared file"):
        write(restore(source, tmp_path / "a.gguf"))
    blocks = blocks_of(source)
    order = order_by(blocks, scores_of(blocks))
    quantized = tmp_path / "q.gguf"
    write(write_prepared(source, quantized, elastic_of(blocks), order, is_ordered=True))
    with pytest.raises(ConfigError, match="was quantized when it was prepared"):
        write(restore(quantized, tmp_path / "a.gguf"))


def test_nothing_is_prepared_twice(prepared, tmp_path):
    with pytest.raises(ConfigError, match=r"is already prepared\. `llmaas elastic restore`"):
        shuffled(prepared, tmp_path / "a.gguf")


# -- models that cannot be elastic ---------------------------------------------------------------


def model_with(path, *, fields=(), tensors=(), arch="llama", alignment=32):
    """Write a model of one layer, with some fields or tensors replaced."""
    shapes = {
        "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
        "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96),
    }  # fmt: skip
    shapes = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()} | dict(tensors)
    rng = np.random.default_rng(0)
    numbers = {
        "block_count": 1,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    writer = GGUFWriter(path, arch)
    writer.add_custom_alignment(alignment)
    for key, value in {f"{arch}.{key}": n for key, n in numbers.items()}.items():
        writer.add_uint32(key, dict(fields).get(key, value))
    for key in set(dict(fields)) - {f"{arch}.{key}" for key in numbers}:
        writer.add_uint32(key, dict(fields)[key])
    for name, shape in shapes.items():
        if shape:
            writer.add_tensor(name, rng.random(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"fields": {"split.count": 3}}, "one of several files; merge them with"),
        ({"fields": {"llama.expert_count": 4}}, "a mixture of experts"),
        ({"fields": {"llama.attention.value_length": 8}}, "keys and values differ in width"),
        ({"fields": {"llama.attention.head_count_kv": 3}}, "4 query heads do not share 3 KV heads"),
        ({"fields": {"llama.feed_forward_length": 64}}, "shape of blk.0.ffn_gate differs"),
        ({"fields": {"llama.block_count": 2}}, "no tensor blk.1.attn_q.weight"),
        ({"fields": {"llama.block_count": 0}}, "no llama.block_count, or has one"),
        ({"tensors": {"blk.0.attn_qkv.weight": (128, 64)}}, "queries, keys and values in one"),
        ({"tensors": {"blk.0.attn_sinks.weight": (4,)}}, "blk.0.attn_sinks.weight, which llama"),
        ({"tensors": {"blk.0.attn_q_norm.weight": (16,)}}, "attn_q_norm.weight, which llama"),
        ({"tensors": {"blk.0.ffn_up.bias": (95,)}}, "shape of blk.0.ffn_up differs"),
        ({"tensors": {"blk.0.ffn_up.scale": (96,)}}, "ffn_up.scale has more than one value"),
        ({"tensors": {"blk.0.ffn_up.weight": None}}, "no tensor blk.0.ffn_up.weight"),
        ({"arch": "phi3"}, "of the family 'phi3'"),
    ],
    ids=str,
)
def test_what_cannot_be_elastic_is_refused_with_the_reason(tmp_path, changed, reason):
    path = model_with(tmp_path / "model.gguf")
    assert blocks_of(path).n_groups == 2
    with pytest.raises(ConfigError, match=reason):
        blocks_of(model_with(path, **changed))


def test_groups_narrower_than_blocks_move_together(tmp_path):
    path = write_family("llama", tmp_path / "model.gguf", weights=Q8_0)
    blocks = replace(blocks_of(path), n_groups=4, group_granule=2)
    order = order_by(blocks, scores_of(blocks))
    check_order(blocks, order)
    assert (order.groups[:, 1::2] == order.groups[:, ::2] + 1).all()
    torn = Order(order.groups[:, [1, 2, 3, 0]], order.neurons)
    for wrong in (torn, Order(order.groups, order.neurons[:, ::-1])):
        with pytest.raises(ConfigError, match="order of a layer's units is impossible"):
            check_order(blocks, wrong)


# -- hostile files -------------------------------------------------------------------------------


def with_field(prepared, path, key, value):
    """Write a prepared file with another value of a field, which becomes the last field."""
    header, content = read_header(prepared), prepared.read_bytes()
    first, last = header.spans.get(key, (header.infos_at, header.infos_at))
    changed = (
        content[:first]
        + content[last : header.infos_at]
        + entry(key, value)
        + content[header.infos_at : header.infos_end]
    )
    path.write_bytes(changed + bytes(-len(changed) % 32) + content[header.data_at :])
    return path


HOSTILE = {
    "levels": [[], [0.5], [1.0, 1.0], [1.0, 0.9], [2.0], ["1"], None, [1.0] * 100],
    "version": [2, "1", None],
    "step": [0, -32, 16, 7, 1 << 40, 1.5],
    "tables": [{}, {"": {}}, {"uniform": {}}, {"../x": {"groups": [], "neurons": []}}, []],
    "anchors": [[2], [-1], ["0"], None],
    "calibration": [None, {}, {"sha256": "", "seed": 0, "n_tokens": -1, "method": ""}],
    "source": [{"sha256": "x", "n_bytes": 1}, {"sha256": "0" * 64}, 3],
    "unknown": [1],
}


@pytest.mark.parametrize("key", HOSTILE)
def test_impossible_fields_are_refused(prepared, tmp_path, key):
    known = json.loads(read_header(prepared).fields[PREFIX])
    for value in HOSTILE[key]:
        text = json.dumps(known | {key: value})
        path = with_field(prepared, tmp_path / "hostile.gguf", PREFIX, text)
        with pytest.raises(ConfigError, match="prepared by another version, or is damaged"):
            read_elastic(path)


@pytest.mark.parametrize("units", ["groups", "neurons"])
def test_impossible_widths_are_refused(prepared, tmp_path, units):
    known = json.loads(read_header(prepared).fields[PREFIX])
    full = known["tables"]["uniform"][units][0][0]
    for level, width in ((0, full // 2), (3, 0), (3, full + 1), (3, -1), (3, full * 2), (3, "1")):
        table = json.loads(json.dumps(known["tables"]["uniform"]))
        table[units][level][0] = width
        text = json.dumps(known | {"tables": {"uniform": table}})
        path = with_field(prepared, tmp_path / "hostile.gguf", PREFIX, text)
        with pytest.raises(ConfigError, match="prepared by another version, or is damaged"):
            read_elastic(path)
    table = known["tables"]["uniform"] | {units: [[full]] * len(known["levels"])}
    text = json.dumps(known | {"tables": {"uniform": table}})
    with pytest.raises(ConfigError, match="lacks widths of 2 layers"):
        read_elastic(with_field(prepared, tmp_path / "hostile.gguf", PREFIX, text))


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000, '{"version": 1}'])
def test_what_is_no_json_of_ours_is_refused(prepared, tmp_path, text):
    with pytest.raises(ConfigError, match="prepared by another version, or is damaged"):
        read_elastic(with_field(prepared, tmp_path / "hostile.gguf", PREFIX, text))


def test_impossible_orders_and_biases_are_refused(prepared, tmp_path):
    key, path = f"{PREFIX}.neurons", tmp_path / "hostile.gguf"
    neurons = read_header(prepared).fields[key]
    for wrong in (neurons[:-1], neurons * 0, neurons.astype("<i4"), neurons + 1):
        with pytest.raises(ConfigError):
            write(restore(with_field(prepared, path, key, wrong), tmp_path / "restored.gguf"))
    blocks = blocks_of(prepared)
    for biases in (np.zeros(5), np.full((9, blocks.n_layers, 2, blocks.n_embd), np.inf)):
        elastic = replace(elastic_of(blocks), biases={"uniform": biases.astype(np.float16)})
        with pytest.raises(ConfigError, match="biases of the table 'uniform' are impossible"):
            elastic.check()


@pytest.mark.parametrize("units", ["groups", "neurons"])
def test_widths_that_grow_as_the_level_falls_are_refused(prepared, tmp_path, units):
    known = json.loads(read_header(prepared).fields[PREFIX])
    table = known["tables"]["uniform"]
    table[units][1:] = [*table[units][-1:], *table[units][1:-1]]  # each single entry is valid
    path = with_field(prepared, tmp_path / "hostile.gguf", PREFIX, json.dumps(known))
    with pytest.raises(ConfigError, match=r"uses more of a layer at level 0\.8 than at 0\.9"):
        read_elastic(path)


def test_names_of_a_file_are_quoted(prepared, tmp_path):
    known = json.loads(read_header(prepared).fields[PREFIX])
    path = tmp_path / "hostile.gguf"
    for key, value in (
        (PREFIX, json.dumps(known | {"\x1b[2J": 1})),
        (f"{PREFIX}.biases.\x1b[2J", np.zeros(1, np.uint16)),
    ):
        with pytest.raises(ConfigError, match=r"is damaged: .*\\x1b\[2J"):
            read_elastic(with_field(prepared, path, key, value))


def test_a_terminal_is_not_told_what_to_do(prepared, tmp_path, capsys):
    known = json.loads(read_header(prepared).fields[PREFIX])
    known["calibration"]["method"] = "\x1b[2Jno method"
    path = with_field(prepared, tmp_path / "hostile.gguf", PREFIX, json.dumps(known))
    assert main(["elastic", "show", str(path)]) == 0
    path = model_with(path, tensors={"blk.0.\x1b[2J": (4,)})
    assert main(["elastic", "score", str(path)]) == 2
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert r"scores by '\x1b[2Jno method' on 0 tokens" in printed.out
    assert r"it has the tensor blk.0.\x1b[2J, which" in printed.err


@pytest.mark.parametrize("n_bytes", [1 << 20, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("n_before", [0, 1])
def test_strings_of_impossible_lengths_are_refused(tmp_path, n_bytes, n_before):
    tokens = entry("tokenizer.ggml.tokens", np.array([], np.uint8))[:-12]
    tokens += struct.pack("<IQ", GGUFValueType.STRING, 1 << 20)
    tokens += struct.pack("<Q1s", 1, b"a") * n_before + struct.pack("<Q", n_bytes)
    path = tmp_path / "hostile.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + tokens + bytes(100))
    with pytest.raises(ConfigError, match="is damaged: its metadata is truncated"):
        read_header(path)


@each({**FOREIGN, **ODD})
def test_files_of_another_kind_are_refused(prepared, tmp_path, damage):
    path = shutil.copy(prepared, tmp_path / "hostile.gguf")
    damage(path)
    with pytest.raises((ConfigError, StoreError), match=r"hostile\.gguf"):
        read_elastic(path)


@pytest.mark.slow
@given(st.data())
def test_damaged_headers_are_read_or_refused(prepared, tmp_path_factory, data):
    content, header = bytearray(prepared.read_bytes()), read_header(prepared)
    first = min(header.spans[PREFIX][0], header.infos_at)
    places = st.one_of(st.integers(0, 200), st.integers(first, header.data_at - 1))
    for at in data.draw(st.lists(places, min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), first, 30, 3]))])
    try:
        elastic = read_elastic(path)
    except LlmaasError:
        return
    assert elastic is None or elastic.check() is elastic


def test_a_source_is_named_by_all_of_it():
    with pytest.raises(ValueError, match="sha256"):
        Source(sha256="../../etc", n_bytes=1)
