"""The measurement of windows: all ways read the same lines and count evaluated tokens."""

from __future__ import annotations

import json
from itertools import chain

import llama_cpp
import numpy as np
import pytest
from outputs import made

from llmaas_eval.window.cli import main
from llmaas_eval.window.study import WAYS, Reader, cut

CHAT = "User: Where is the station?\nAssistant: It is behind the church, next to the river.\n" * 12
WINDOW = 128


@pytest.fixture
def llama(make_llama):
    return make_llama(n_ctx=512, n_threads_batch=1, flash_attn=True)


@pytest.fixture
def lines(llama):
    [lines] = cut(llama, CHAT, 220)
    return lines


def positions(llama):
    memory = llama_cpp.llama_get_memory(llama.ctx)
    return [
        llama_cpp.llama_memory_seq_pos_min(memory, 0),
        llama_cpp.llama_memory_seq_pos_max(memory, 0),
    ]


def read_until_full(reader, lines):
    """Return the lines that were read, and the remaining ones."""
    found = []
    for i, line in enumerate(lines):
        if not reader.has_room(line):
            return np.concatenate(found), lines[:i], lines[i:]
        found.append(reader.read(line))
    return pytest.fail("the window took it all")


def test_a_text_is_cut_into_its_lines(llama, lines):
    tokens = llama.tokenize(CHAT.encode(), add_bos=False)
    assert list(chain(*lines)) == tokens[: sum(map(len, lines))]
    assert {llama.detokenize(line)[-1:] for line in lines} == {b"\n"}
    [long] = cut(llama, "word " * 200, 190)
    assert max(map(len, long)) == 64


def test_all_ways_are_alike_until_the_window_is_full(llama, lines):
    found = [read_until_full(Reader(llama, WINDOW, way), lines)[0] for way in WAYS]
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_making_room(llama, lines, way):
    reader = Reader(llama, WINDOW, way)
    _, read, left = read_until_full(reader, lines)
    before = (reader.n_cells, reader.n_evaluated)
    assert before == (1 + sum(map(len, read)),) * 2
    reader.make_room()
    n_kept = next(n for i in range(len(read)) if (n := sum(map(len, read[i:]))) <= WINDOW // 2)
    n_cells, n_evaluated = {
        "evaluated again": (1 + n_kept, before[1] + 1 + n_kept),
        "without a window": before,
    }.get(way.name, (n_kept + (way.n_sinks or 0), before[1]))
    assert (reader.n_cells, reader.n_evaluated) == (n_cells, n_evaluated)
    reader.read(left[0])
    assert positions(llama) == [0, n_cells + len(left[0]) - 1]


def test_evaluated_again_is_as_if_nothing_had_been_before(llama, lines):
    again = Reader(llama, WINDOW, WAYS[0])
    _, read, left = read_until_full(again, lines)
    again.make_room()
    found = again.read(left[0])
    fresh = Reader(llama, WINDOW, WAYS[0])
    n_kept = again.n_cells - len(left[0]) - 1
    while sum(map(len, read)) > n_kept:
        read = read[1:]
    for line in read:
        fresh.read(line)
    assert np.array_equal(found, fresh.read(left[0]))


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    data, output = tmp_path / "chat.txt", tmp_path / "found.json"
    data.write_text(CHAT)
    options = ["--window", str(WINDOW), "--tokens", "220", "--data", str(data)]
    assert main([*options, "-o", str(output)]) == 0
    found = json.loads(output.read_text())
    assert [row["name"] for row in found["rows"]] == [way.name for way in WAYS]
    table = capsys.readouterr().out
    assert all(f"| {way.name} |" in table for way in WAYS)
    again, *moved, unlimited = found["rows"]
    assert again["against_first"] == [1, 1, 1]
    assert {row["evaluated"] for row in [*moved, unlimited]} == {1}
    assert again["evaluated"] > 1.3
    (row,) = made("window", found)
    assert row[:2] == [str(WINDOW), str(found["texts"])]


@pytest.mark.parametrize(("tokens", "way_out"), [(220, "raise --tokens"), (900, "lower --tokens")])
def test_a_text_of_the_wrong_length(tmp_path, capsys, tokens, way_out):
    data = tmp_path / "chat.txt"
    data.write_text(CHAT)
    assert main(["--window", "512", "--tokens", str(tokens), "--data", str(data)]) == 2
    assert way_out in capsys.readouterr().err
