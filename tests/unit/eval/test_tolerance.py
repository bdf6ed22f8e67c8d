"""The evaluation of tolerance-aware compression: texts, rivals, bytes and tables."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from llmaas_eval.data import packaged_lines
from llmaas_eval.stats import mean_interval
from llmaas_eval.tolerance.coded import MAX_BITS, Coded
from llmaas_eval.tolerance.plots import draw_curves
from llmaas_eval.tolerance.recall import make_alike, make_facts, make_recall, make_training
from llmaas_eval.tolerance.report import (
    DISTANCE,
    KL,
    by_arm,
    quality_table,
    recall_table,
    task_table,
)
from llmaas_eval.tolerance.rivals import RIVALS, Case, by_layer
from llmaas_plugins._native import (
    Codec,
    KVGeometry,
    blob_init,
    blob_size,
    chunk_bound,
    chunk_encode,
    chunks_decode,
)

N_CHUNKS, N_LAYER, ROW = 5, 3, 256
GEOMETRY = KVGeometry(N_LAYER, False, 1, 1, (ROW,) * N_LAYER, (ROW,) * N_LAYER)
CELLS = 16 * N_CHUNKS


@pytest.fixture(scope="module")
def chats():
    return packaged_lines()


@pytest.fixture(scope="module")
def blob():
    values = np.random.default_rng(0).normal(size=blob_size(GEOMETRY, CELLS) // 2)
    blob = values.astype(np.float16).view(np.uint8).copy()
    blob_init(GEOMETRY, blob, range(CELLS))
    return blob


@pytest.fixture(scope="module")
def coded(blob):
    return Coded(blob)


def through_the_codec(blob, codec, bits):
    """Encode each chunk at its bits and decode it; return the blob and the stored bytes."""
    found, total = blob.copy(), 0
    for chunk, few in enumerate(bits):
        room = bytearray(chunk_bound(GEOMETRY, codec, 16, few))
        n = chunk_encode(GEOMETRY, codec, blob, CELLS, 16 * chunk, 16, bytes(32), room, few)
        chunks_decode(GEOMETRY, [bytes(room[:n])], [16 * chunk], found, CELLS)
        total += n
    return found, total


# -- text that facts are in ------------------------------------------------------------------------


def test_a_seed_gives_one_recall(chats):
    facts = make_facts(Random(0), 6)
    first, again = (make_recall(Random(7), chats, facts, 900) for _ in range(2))
    assert first == again
    assert first != make_recall(Random(8), chats, facts, 900)


@pytest.mark.parametrize("make", [make_facts, make_alike])
def test_a_fact_is_told_once_in_the_first_half_and_asked_for_after_the_context(chats, make):
    recall = make_recall(Random(1), chats, make(Random(1), 6), 2000)
    for prompt, answer in recall.questions:
        stem = prompt.rpartition("Assistant: ")[2]
        statement = f"{stem[1:]}{answer[:-2]}."
        assert recall.context.count(statement) == 1
        assert recall.context.index(statement) < len(recall.context) / 2
        assert answer.endswith(".\n")
    assert recall.context.endswith("\n")


def test_facts_are_about_different_things():
    facts = make_facts(Random(3), 16)
    assert len({fact.question for fact in facts}) == len(facts) == 16


def test_facts_that_are_alike_share_their_people_and_their_things():
    facts = make_alike(Random(3), 6)
    pairs = {tuple(fact.question.split(" of ", 1)[1][:-1].split("'s ")) for fact in facts}
    assert len(pairs) == 6
    for each in zip(*pairs, strict=True):
        assert len(set(each)) <= 3
    assert all(len(fact.answer) == 5 for fact in facts)


def test_training_asks_only_for_what_was_told(chats):
    text = ""
    for prompt, answer in make_training(Random(2), chats, 3000, gap=300):
        text += prompt
        stem = prompt.rpartition("Assistant: ")[2]
        assert f"{stem[1:]}{answer[:-2]}." in text
        text += answer
    assert len(text) >= 3000


# -- bytes and bits --------------------------------------------------------------------------------


def test_a_restored_context_is_what_the_codec_makes_of_each_chunk(coded, blob):
    bits = np.array([8, 1, 4, 2, 5])
    expected, n_bytes = through_the_codec(blob, Codec.PLANES, bits.tolist())
    assert np.array_equal(coded.restored(bits), expected)
    assert coded.n_bytes(bits) == n_bytes


def test_int8_is_the_static_codec(coded, blob):
    found, n_bytes = coded.int8()
    expected, total = through_the_codec(blob, Codec.INT8, [8] * N_CHUNKS)
    assert np.array_equal(found, expected)
    assert n_bytes == total


def test_a_layer_has_its_own_bits(coded):
    bits = np.full((N_LAYER, N_CHUNKS), 8)
    bits[1] = 2
    mixed, fine, coarse = (coded.restored(b) for b in (bits, np.array(8), np.array(2)))
    rows = 16 + 12 * CELLS + 8 + np.arange(2 * N_LAYER + 1) * (12 + ROW * CELLS)
    for part in range(2 * N_LAYER):
        layer = slice(rows[part], rows[part + 1])
        assert np.array_equal(mixed[layer], (coarse if part % N_LAYER == 1 else fine)[layer])


def test_the_mean_of_the_bits_decides_the_bytes(coded):
    """Rivals with the same mean are therefore compared at equal bytes."""
    layers = np.full((N_LAYER, N_CHUNKS), 2)
    layers[0] = 8
    expected = coded.n_bytes(np.full(N_CHUNKS, 4))
    assert coded.n_bytes(layers) == coded.n_bytes(np.array([8, 2, 2, 4, 4])) == expected


# -- rivals ----------------------------------------------------------------------------------------


def case(mean=4.0, levels=(8, 4, 2), n=40):
    density = np.random.default_rng(1).lognormal(sigma=1.0, size=n)
    damage = np.outer([1.0, 5.0, 25.0], 4.0 ** -np.arange(1.0 + MAX_BITS))
    return Case(density, levels, mean, damage, np.random.default_rng(2))


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize(("mean", "levels"), [(4.0, (8, 4, 2)), (2.0, (4, 2, 1))])
def test_no_rival_has_more_bits_than_the_others(name, mean, levels):
    bits = RIVALS[name](case(mean, levels))
    assert set(np.unique(bits)) <= {*levels, int(mean)}
    assert 0.9 * mean < bits.mean() <= mean


def test_random_and_recency_give_ours_to_other_chunks():
    some = case(levels=(8, 6, 5, 4, 3, 2))
    ours, other, newest = (RIVALS[name](some) for name in ("ours", "random", "recency"))
    assert sorted(ours) == sorted(other) == newest.tolist()
    assert not np.array_equal(ours, other)


def test_static_gives_the_newest_what_is_left_over():
    assert RIVALS["static"](case(mean=2.5, n=4)).tolist() == [2, 2, 3, 3]


def test_layers_that_suffer_most_get_most():
    bits = by_layer(case(levels=(8, 6, 5, 4, 3, 2)))
    assert bits.tolist() == sorted(bits)
    assert bits[0] < bits[-1]


def test_eq_3_as_printed_gives_the_densest_chunks_least():
    some = case()
    bits = RIVALS["as printed"](some)
    densest, thinnest = some.density.argmax(), some.density.argmin()
    assert bits[densest] == 2
    assert bits[thinnest] == 8


# -- tables ----------------------------------------------------------------------------------------


def test_an_interval_is_around_the_mean():
    values = np.random.default_rng(0).normal(5, 1, 400)
    mean, low, high = mean_interval(values)
    assert low < mean == values.mean() < high
    assert high - low == pytest.approx(4 / 20, rel=0.15)


def rows(arm, mean, values, key):
    other = dict.fromkeys(
        ("kl", "kl_first", "top1_first", "surprise", "attention_error", "right", "nats"), 0.0
    )
    fixed = {"arm": arm, "mean": mean, "bits": mean, "share": 0.25, "task": "chats"}
    return [fixed | other | {key: value} for value in values]


def test_differences_are_of_the_same_text():
    kl = np.random.default_rng(0).uniform(1e-4, 1e-2, 30)
    both = rows("static", 4.0, kl, "kl") + rows("ours", 4.0, kl - 5e-5, "kl")
    table = quality_table(both)
    (ours,) = [row for row in table.rows if row[0] == "ours"]
    assert ours[table.columns.index("less static's")] == "−0.50 (−0.50 to −0.50)"


def test_recall_is_against_the_cells_as_they_were():
    right = rows("f16", 16.0, [1.0] * 9, "right") + rows("static", 2.0, [0.5] * 9, "right")
    static = recall_table(right).rows[1]
    assert static == ["static", "2", "25.0 %", "50.0 %", "−50.0 (−50.0 to −50.0)", ""]


OURS, STATIC = ("ours", 4.0), ("static", 4.0)


def test_tasks_are_apart_and_together():
    both = rows(*OURS, [1e-4] * 5, "kl") + rows(*STATIC, [3e-4] * 5, "kl")
    news = [row | {"task": "news", "kl": 5 * row["kl"]} for row in both]
    assert task_table(both + news, [(OURS, STATIC)], KL).rows == [
        ["chats", "1.00", "3.00", "−2.00 (−2.00 to −2.00)"],
        ["news", "5.00", "15.00", "−10.00 (−10.00 to −10.00)"],
        ["all", "3.00", "9.00", "−6.00 (−8.40 to −3.60)"],
    ]


def test_a_lower_perplexity_is_a_distance_too():
    both = rows(*OURS, [0.001] * 5, "surprise") + rows(*STATIC, [-0.004] * 5, "surprise")
    line = task_table(both, [(OURS, STATIC)], DISTANCE).rows[0]
    assert line[1:3] == ["0.10", "0.40"]
    assert line[3].startswith("−0.30 (")


def test_a_picture_has_a_panel_for_each_probe(tmp_path):
    points = rows("static", 4.0, [0.9], "right") + rows("static", 2.0, [0.6], "right")
    draw_curves({"facts": points}, "right", tmp_path / "one.png")
    draw_curves({"facts": points, "alike": points}, "right", tmp_path / "two.png")
    one, two = (width(tmp_path / name) for name in ("one.png", "two.png"))
    assert two > 1.5 * one


def width(png):
    return int.from_bytes(png.read_bytes()[16:20], "big")


def test_arms_of_other_means_are_other_arms():
    both = rows("static", 4.0, [1.0], "kl") + rows("static", 2.0, [1.0], "kl")
    assert set(by_arm(both)) == {("static", 4.0), ("static", 2.0)}
