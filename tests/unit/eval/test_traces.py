"""Traces: their format, reproducibility from a seed, and the shape of each pattern."""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from llmaas_eval.traces import FAMILIES, PATTERNS, Settings, generate, read_trace, write_trace
from llmaas_eval.traces.__main__ import main

SYNTHETIC = [pattern for pattern in PATTERNS if pattern != "azure"]
LONG = 5000  # hours


@functools.cache
def long_trace(pattern, **settings):
    return generate(Settings(pattern, hours=LONG, **settings)).calls


@pytest.mark.parametrize("pattern", SYNTHETIC)
def test_a_seed_gives_one_trace(pattern):
    first, again = (generate(Settings(pattern=pattern, seed=7)) for _ in range(2))
    assert first == again
    assert first != generate(Settings(pattern=pattern, seed=8))


def test_the_trace_of_a_seed_is_the_same_everywhere():
    calls = generate(Settings(seed=0)).calls
    found = [(call.time_s, call.context, call.n_prompt, call.n_reply) for call in calls[:3]]
    assert found == FIRST_THREE
    assert len(calls) == 863


FIRST_THREE = [(558.182, 6, 319, 7), (648.075, 1, 1265, 140), (1107.538, 6, 336, 7)]


@pytest.mark.parametrize("pattern", SYNTHETIC)
def test_calls_arrive_as_a_poisson_process(pattern):
    times = [call.time_s for call in long_trace(pattern)]
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert times[-1] <= LONG * 3600
    assert gaps.mean() == pytest.approx(300, rel=0.03)
    assert gaps.std() == pytest.approx(300, rel=0.03)  # exponential: the deviation equals the mean
    assert np.mean(gaps > 300) == pytest.approx(np.exp(-1), abs=0.01)


def test_contexts_belong_to_families_in_turn_and_grow_as_table_3_says():
    calls = long_trace("random")
    names = list(FAMILIES)
    assert all(call.family == names[call.context % len(names)] for call in calls)
    for name, family in FAMILIES.items():
        deltas = [call.n_delta for call in calls if call.family == name]
        assert family.low <= min(deltas) <= max(deltas) <= family.high
        assert np.mean(deltas) == pytest.approx(family.mean, rel=0.03)
    assert all(call.n_prompt >= 1 and call.n_reply >= 1 for call in calls)


def test_no_call_adds_more_than_a_context_holds():
    calls = generate(Settings(max_tokens=256)).calls
    assert max(call.n_delta for call in calls) == 256


def test_random_calls_all_contexts_alike():
    counts = Counter(call.context for call in long_trace("random"))
    assert min(counts.values()) == pytest.approx(max(counts.values()), rel=0.1)


def test_markov_calls_the_one_used_kth_last_k_times_as_seldom():
    order, ranks = list(range(8)), Counter()
    for call in long_trace("markov", contexts=8):
        rank = order.index(call.context)
        ranks[rank + 1] += 1
        order.insert(0, order.pop(rank))
    for k in range(2, 9):
        assert k * ranks[k] == pytest.approx(ranks[1], rel=0.08)


def test_gaussian_prefers_moderate_calls():
    calls = long_trace("gaussian", contexts=6)
    counts = Counter(call.family for call in calls)
    by_length = sorted(FAMILIES, key=lambda name: FAMILIES[name].mean)
    mean = np.mean([FAMILIES[name].mean for name in FAMILIES])
    by_distance = sorted(FAMILIES, key=lambda name: abs(FAMILIES[name].mean - mean))
    assert [name for name, _ in counts.most_common()][-1] == by_length[-1] == by_distance[-1]
    shares = [counts[name] for name in by_distance]
    assert all(near > 0.9 * far for near, far in pairwise(shares))


def test_recorded_arrivals_keep_their_times_and_lengths(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,9000,109\n"
    )
    first, second = generate(Settings("azure"), arrivals=path).calls
    assert (first.time_s, first.n_prompt, first.n_reply) == (0.0, 374, 44)
    assert (second.time_s, second.n_delta, second.n_reply) == (4.315, 2048, 109)


def test_a_file_gives_the_trace_back(tmp_path):
    trace = generate(Settings(hours=2))
    write_trace(trace, tmp_path / "trace.jsonl")
    again = read_trace(tmp_path / "trace.jsonl")
    assert (again.settings, again.calls) == (trace.settings, trace.calls)


@pytest.mark.parametrize(
    "header",
    ['{"role": "user"}', "", "[]", '{"format": "llmaas-trace", "version": 2, "settings": {}}'],
)
def test_a_file_of_another_kind_is_refused(header, tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text(header)
    with pytest.raises(ValueError, match=r"other\.jsonl: found .*, expected"):
        read_trace(path)


ROWS = {
    "ag_news_test": {"label": 2, "title": "A match", "text": "It was won."},
    "qmsum_val": {
        "turns": [{"role": "A", "content": "We ship in May."}],
        "queries": [{"query": "When do they ship?", "answer": "In May."}],
    },
    "dialogsum_test": {"dialogue": "A: Hello!", "summary1": "A says hello."},
    "boolq_test": {"instruction": "Is the sea salty?", "answer": "true"},
    "multi30k_de_en": {"de": "Ein Hund.", "en": "A dog."},
    "sst2_test": {"text": "a fine film", "label": 1},
}
ANSWERS = {
    "news": "Sports",
    "summary": "In May.",
    "chat": "A says hello.",
    "comprehension": "true",
    "translation": "A dog.",
    "sentiment": "positive",
}


@pytest.fixture
def data(tmp_path):
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_data_sets_give_the_texts_and_change_nothing_else(data):
    bare, told = generate(Settings(hours=24)), generate(Settings(hours=24), data)
    for without, call in zip(bare.calls, told.calls, strict=True):
        assert replace(call, prompt=None, truth=None) == without
        assert call.prompt
        assert len(call.prompt) <= 4 * call.n_prompt
        assert set(call.truth.splitlines()) == {ANSWERS[call.family]}


def test_the_command_writes_a_trace(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    assert main(["--pattern", "random", "--contexts", "3", "--hours", "5", "-o", str(path)]) == 0
    settings = Settings(pattern="random", contexts=3, hours=5.0)
    assert read_trace(path) == read_trace_of(settings, tmp_path)
    assert "of 3 contexts" in capsys.readouterr().out


def read_trace_of(settings, folder):
    write_trace(generate(settings), folder / "other.jsonl")
    return read_trace(folder / "other.jsonl")


@pytest.mark.parametrize(
    "arguments", [["--pattern", "azure"], ["--arrivals", "x.csv"], ["--data", "nowhere"]]
)
def test_a_command_that_cannot_work_says_why(arguments, tmp_path, capsys):
    assert main([*arguments, "-o", str(tmp_path / "trace.jsonl")]) == 2
    assert "expected" in capsys.readouterr().err
