"""Expressions of a user that protect words."""

from __future__ import annotations

import time

import pytest

from llmaas_hooks import ConfigError
from llmaas_plugins.short_prompts import patterns
from llmaas_plugins.short_prompts.patterns import Pattern

TAKEN = (
    r"\bACME\b",
    r"[A-Z]{2,4}-\d+",
    r"\d{1,3}(?:\.\d+)?",
    "(?i)(mon|tues|wednes|thurs|fri|satur|sun)day",
    r"order #\d+",
    r"\$[\d,]+",
    "[]a]b",
    "(abc){3}",
)


@pytest.mark.parametrize("text", TAKEN)
def test_simple_expressions_are_taken(text):
    assert Pattern(text).text == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(a", r"unterminated subpattern"),
        ("*a", r"nothing to repeat"),
        ("a" * 201, r"it has 201 characters, the limit is 200"),
        ("(a+)+b", r"repetitions or choices is repeated"),
        ("(a|a)*b", r"repetitions or choices is repeated"),
        ("((a|b)c){2,9}", r"repetitions or choices is repeated"),
        (r"\w+\w+\w+x", r"it may take \d+ attempts on 128 characters"),
        ("a?" * 20 + "a" * 20, r"it may take \d+ attempts"),
        ("(a|a)" * 30, r"it may take \d+ attempts"),
        (r"(a)\1", r"is not allowed here"),
        ("(?=a)b", r"is not allowed here"),
        ("(?x) a", r"is not allowed here"),
        ("a{99999999999}", r"too large"),
    ],
)
def test_expressions_that_may_take_long_are_refused(text, reason):
    with pytest.raises(
        ConfigError, match=f"cannot use the expression .* for words to keep: .*{reason}"
    ):
        Pattern(text)


def test_matches_are_found_in_all_lines_and_in_long_ones():
    text = f"{'x ' * 500}AB-12 y\nAB-3\n\nAB-4{' z' * 100}"
    found = {text[start:end] for start, end in Pattern(r"AB-\d+").spans(text)}
    assert found == {"AB-12", "AB-3", "AB-4"}


def test_empty_matches_count_for_nothing():
    assert list(Pattern("x*").spans("abc")) == []


@pytest.mark.parametrize("text", TAKEN)
@pytest.mark.parametrize("piece", ["a", "1", "AB-", "1.", "(", "abc"])
def test_expressions_take_linear_time_on_any_text(text, piece):
    pattern, hostile = Pattern(text), piece * (50_000 // len(piece))
    started = time.perf_counter()
    assert sum(1 for _ in pattern.spans(hostile)) <= 2 * len(hostile)
    assert time.perf_counter() - started < 2


def test_text_that_there_is_no_time_for_counts_as_matched(monkeypatch):
    monkeypatch.setattr(patterns, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(patterns, "_SECONDS_A_CHARACTER", 0.0)
    assert list(Pattern("b").spans("abc")) == [(0, 3)]
