"""The evaluation of knn_lm: its users, near-duplicates, neighbors and intervals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from llmaas_eval.knn.drift import drifted
from llmaas_eval.knn.duplicates import likeness, without_duplicates
from llmaas_eval.knn.generation import variety
from llmaas_eval.knn.keys import Part, UserKeys
from llmaas_eval.knn.methods import METHODS, without_weights
from llmaas_eval.knn.neighbors import search
from llmaas_eval.knn.report import changes_table, means_table, perplexity_table
from llmaas_eval.knn.rows import as_json, from_json
from llmaas_eval.knn.scoring import Row, first, probability
from llmaas_eval.knn.users import USERS, Chat, Split, load, split
from llmaas_eval.stats import Surprise, change, mean_change, perplexity
from llmaas_plugins.knn_lm.archive.pairs import Pairs
from llmaas_plugins.knn_lm.mixing.grid_search import HeldOut
from llmaas_plugins.knn_lm.mixing.mixture import Mixture
from llmaas_plugins.knn_lm.mixing.trust import Trust

ANSWER = "A long walk each day is good for the heart, and so is a night of sound sleep. " * 2


def chats(*texts):
    return [Chat(str(i), (("user", text),)) for i, text in enumerate(texts)]


def write(folder, source, *rows):
    (folder / "chat").mkdir(exist_ok=True)
    lines = [json.dumps({"turns": talk("Hello?", "Hello."), **row}) for row in rows]
    (folder / "chat" / f"{source}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def talk(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def found_by_user(folder, source):
    names = [name for name, (of, _) in USERS.items() if of == source]
    return {name: [chat.name for chat in load(folder, name)] for name in names}


def test_a_topic_is_what_most_of_its_words_are_about(tmp_path):
    write(
        tmp_path,
        "alpaca_a",
        {"id": "one", "turns": talk("What exercise helps patients sleep?", ANSWER)},
        {"id": "both", "turns": talk("Which exercise, diet, company and product?", "No. " * 50)},
        {"id": "none", "turns": talk("Who won?", "Nobody did. " * 50)},
        {"id": "short", "turns": talk("Which exercise, which diet, which sleep?", "All.")},
    )
    found = found_by_user(tmp_path, "alpaca_a")
    assert found.pop("topic-health") == ["one"]
    assert not any(found.values())


def test_a_dialogue_is_of_who_uses_most_of_its_services(tmp_path):
    write(
        tmp_path,
        "sgd_dev",
        {"id": "trip", "services": ["Flights_3", "Hotels_1", "Weather_1"]},
        {"id": "evening", "services": ["Movies_2"]},
        {"id": "tie", "services": ["Banks_2", "Events_1"]},
    )
    assert found_by_user(tmp_path, "sgd_dev") == {
        "turns-travel": ["trip"],
        "turns-leisure": ["evening", "tie"],
        "turns-errands": [],
    }


def test_users_of_tasks_and_of_cloud_models(tmp_path):
    write(tmp_path, "mtbench101", {"id": "CM-1"}, {"id": "MR-2"})
    assert found_by_user(tmp_path, "mtbench101") == {
        "turns-follows": ["CM-1"],
        "turns-adapts": ["MR-2"],
    }
    write(tmp_path, "alpaca_eval_cloud", {"id": "a", "model": "gpt4"})
    assert [name for name, ids in found_by_user(tmp_path, "alpaca_eval_cloud").items() if ids] == [
        "cloud-gpt-4"
    ]


def test_a_split_is_by_conversation_and_always_the_same():
    all_chats = chats(*map(str, range(50)))
    parts = split(all_chats, "a user")
    assert (len(parts.train), len(parts.test)) == (35, 15)
    assert sorted([*parts.train, *parts.test]) == sorted(all_chats)
    assert parts == split(all_chats, "a user")
    assert parts != split(all_chats, "another user")


def test_near_duplicates_leave_the_test_part():
    words = "the quick brown fox jumps over the lazy dog and runs far away into the dark wood"
    train = chats(words, "what is the capital of France")
    test = chats(
        words.replace("quick", "slow").upper(),
        "the dog and the fox are friends who live in the dark wood",
        "What is the capital of FRANCE?",
    )
    kept = without_duplicates(Split(train, test))
    assert kept.train == train
    assert kept.test == [test[1]]


def test_likeness_counts_shingles_of_five_words():
    parts = Split(chats("a b c d e f", "b c d e f g"), chats("a b c d e f g", "x"))
    found = likeness(parts)
    assert found.jaccard.tolist() == [2 / 3, 0]
    assert found.contained.tolist() == [2 / 3, 0]
    assert found.known.tolist() == [1, 0]
    assert not found.asked.any()


def test_neighbors_are_those_of_every_subset():
    rng = np.random.default_rng(0)
    keys, queries = (rng.standard_normal((n, 8)).astype(np.float16) for n in (500, 20))
    subsets = [np.arange(500), rng.choice(500, 60, replace=False)]
    distances = ((queries[:, None].astype(np.float64) - keys) ** 2).sum(axis=2)
    for rows, found in zip(subsets, search(queries, keys, subsets, k=10), strict=True):
        expected = rows[np.argsort(distances[:, rows], axis=1)[:, :10]]
        assert np.array_equal(found.rows, expected)
        assert np.allclose(
            found.distances, np.take_along_axis(distances, expected, axis=1), atol=1e-4
        )


def test_a_subset_has_as_many_pairs_as_are_searched_for():
    keys = np.zeros((50, 4), np.float16)
    with pytest.raises(ValueError, match="subset has 9 pairs, expected at least 10"):
        search(keys, keys, [np.arange(9)], k=10)


def test_perplexity_is_of_all_targets_and_its_change_is_paired():
    conversations = np.repeat([0, 1, 2], [2, 1, 1]).astype(np.int32)
    base = Surprise.of(np.array([0.5, 0.5, 0.1, 0.25], np.float32), conversations)
    better = Surprise.of(np.array([1, 1, 0.2, 0.5], np.float32), conversations)
    assert base.n.tolist() == [2, 1, 1]
    assert perplexity(base) == pytest.approx((2 * 2 * 10 * 4) ** (1 / 4))
    assert change(better, base) == pytest.approx((-50, -50, -50))
    assert mean_change([(better, base), (base, base)]) == pytest.approx((-25, -25, -25))


def test_an_interval_is_as_wide_as_conversations_differ():
    base = Surprise(np.full(40, 100.0), np.full(40, 50))
    mixed = Surprise(base.nats + np.tile([0.0, -1.0], 20), base.n)
    found = change(mixed, base)
    assert found.value == pytest.approx(100 * np.expm1(-0.5 / 50))
    assert found.low < found.value < found.high < 0


def part(lengths):
    n = sum(lengths)
    keys, p = np.zeros((n, 4), np.float16), np.ones(n, np.float32)
    values = np.arange(n, dtype=np.int32)
    conversations = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return Part(keys, keys, values, p, p, conversations)


def test_only_whole_conversations_are_scored():
    assert [len(first(part([3, 4, 5]), n)) for n in (1, 3, 4, 7, 100)] == [3, 3, 7, 7, 12]


def test_joined_parts_count_their_conversations_on():
    found = Part.joined([part([2, 1]), part([1, 2])])
    assert found.conv.tolist() == [0, 0, 1, 2, 3, 3]
    assert found.values.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("name", METHODS)
def test_no_method_takes_more_bytes_than_another(name):
    rng = np.random.default_rng(0)
    n, n_embd, limit = 2000, 8, 400
    history = Pairs(
        rng.standard_normal((n, n_embd)).astype(np.float16),
        rng.integers(0, 5, n, np.int32),
        rng.uniform(0.01, 1, n).astype(np.float32),
        np.ones(n, np.float32),
    )
    chosen = METHODS[name](history, limit)
    assert len(np.unique(chosen.rows)) == len(chosen.rows)
    n_bytes = len(chosen.rows) * (2 * n_embd + 4 + (0 if chosen.weights is None else 4))
    assert n_bytes <= limit * (2 * n_embd + 8) or name == "full"
    assert len(chosen.rows) >= 0.4 * limit


def test_what_has_no_weights_may_have_more_pairs():
    assert without_weights(1000, 256) == 1007


def test_tables_have_a_line_a_user_and_their_mean():
    def row(user, method, nats):
        surprise = Surprise(np.array([nats, nats]), np.array([10, 10]))
        return Row(user, method, 1000, 300 if method != "pure" else 0, None, surprise)

    rows = [
        row(user, method, nats)
        for user in ("a", "b")
        for method, nats in (("pure", 20.0), ("random", 18.0), ("offline", 17.0))
    ]
    assert perplexity_table(rows).rows[0] == ["a", "1,000", "7.39", "6.05", "**5.47**"]
    lines = changes_table(rows, ["offline"], ["pure", "random"]).rows
    assert lines[-1] == ["**mean**", "−25.9 % (−25.9 to −25.9)", "−9.5 % (−9.5 to −9.5)"]
    assert [line[0] for line in lines] == ["a", "b", "**mean**"]
    assert means_table(rows, ["random", "offline"], ["pure"]).rows == [
        ["random", "30 %", "−18.1 % (−18.1 to −18.1)"],
        ["**offline**", "30 %", "**−25.9 %** (−25.9 to −25.9)"],
    ]


def test_a_row_is_read_as_it_was_written():
    surprise = Surprise(np.array([1.5, 2.5]), np.array([3, 4]))
    for mixture in (None, Mixture(alpha=0.5, beta=0.0, theta=1.0)):
        row = Row("a", "full", 9, 5, mixture, surprise)
        found = from_json(json.loads(json.dumps(as_json(row))))
        assert found[:5] == row[:5]
        assert [each.tolist() for each in found.surprise] == [each.tolist() for each in surprise]


def test_a_drifting_user_has_both_domains_in_turn():
    a, b, c = (UserKeys(name, part([1] * 200), part([2] * 120)) for name in "abc")
    keys, mixed = drifted(a, b, c)
    assert keys.train.conv.tolist() == list(range(300))
    assert keys.train.values[:4].tolist() == [0, 0, 1, 1]
    assert len(keys.test) == 200
    assert mixed.conv.max() == 199


def test_variety_counts_runs_of_tokens():
    loop, new = [1, 2, 3, 4] * 3, list(range(10, 22))
    found = variety([loop, new], history=[list(range(8, 19))])
    assert found.distinct_1 == pytest.approx(100 * 16 / 24)
    assert found.distinct_2 == pytest.approx(100 * 15 / 22)
    assert found.repeated == pytest.approx(100 * 5 / 18)
    assert found.copied == pytest.approx(100 * 2 / 10)


def test_each_conversation_is_trusted_for_itself():
    p = np.array([0.2, 0.2, 0.2, 0.2], np.float32)
    some = replace(part([3, 1]), p=p, max=p)
    hits = np.array([[True], [True], [False], [False]])
    met = HeldOut(np.zeros((4, 1), np.float32), hits, np.ones((4, 1), np.float32), p, p)
    mixture = Mixture(alpha=0.5, beta=0.0, theta=1.0)
    always = probability(mixture, met, some, has_trust=False)
    found = probability(mixture, met, some, has_trust=True)
    assert always == pytest.approx([0.6, 0.6, 0.1, 0.1])
    assert found[[0, 3]] == pytest.approx([0.3, 0.175])
    assert found[1] > found[0]
    assert 0.1 < found[2] < found[3]


@pytest.mark.parametrize(("n_prompt", "judged"), [(10, slice(10)), (70, slice(6, 70))])
def test_a_reply_is_trusted_as_the_end_of_its_prompt(n_prompt, judged):
    p = np.full(72, 0.2, np.float32)
    some = replace(part([72]), p=p, max=p)
    hits = np.arange(72)[:, None] >= 6
    met = HeldOut(np.zeros((72, 1), np.float32), hits, np.ones((72, 1), np.float32), p, p)
    mixture = Mixture(alpha=0.5, beta=0.0, theta=1.0)
    trust = Trust()
    for is_hit in hits[judged, 0]:
        trust.observe(0.6 if is_hit else 0.1, 0.2)
    found = probability(mixture, met, some, has_trust=True, n_prompt=n_prompt)
    assert found[n_prompt:] == pytest.approx(0.2 + 0.4 * trust.weight)
