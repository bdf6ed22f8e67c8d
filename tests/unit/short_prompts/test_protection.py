"""Words that are never left out."""

from __future__ import annotations

import time

import pytest

from llmaas_plugins.short_prompts.patterns import Pattern
from llmaas_plugins.short_prompts.protection import KINDS, Protection

QUESTION = "\n\nSo where was it in the end, do you think?"


def kept(prompt):
    """Return the kept words before the question, without blanks and without the first token."""
    words = zip(prompt.words[1 : prompt.question], prompt.is_protected[1:], strict=False)
    return [word.strip() for word, is_kept in words if is_kept]


@pytest.fixture
def kept_of(prompt):
    return lambda text, *args: kept(prompt(f"{text}{QUESTION}", *args))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it cost 3.50 or so at 10:30 on the 4th", "3.50 10:30 4th"),
        ("we met Anna near the Baltic Sea, she said", "Anna Baltic Sea,"),
        ("there. The end of it. A dog came", ""),
        ("there. Anna went. We saw Anna again", "Anna Anna"),
        ('he told me. "I will." Then I left. But I came back', '"I will."'),
        ("we saw Mr. Smith and Dr. Jones", "Mr. Smith Dr. Jones"),
        ("set user_id and maxSize in std::map", "user_id maxSize std::map"),
        ("call foo.bar() or --flag, e.g. here", "foo.bar() --flag, e.g."),
        ("see https://example.org/a?b and a@b.org", "https://example.org/a?b a@b.org"),
        ("open /etc/passwd or C:\\temp or src/main", "/etc/passwd C:\\temp src/main"),
        ("type `rm all` or ```\nmore code\n``` now", "`rm all` ``` more code ```"),
        ("type ``` some code to the end", "``` some code to the end"),
        ('she said "well and good" and “no” then', '"well and good" “no”'),
        ('an inch is " and no more', ""),
        ("a - b, c; d (e) f! g? h: i", ""),
    ],
)
def test_words_that_carry_facts_are_kept(kept_of, text, expected):
    assert kept_of(text) == expected.split()


def test_a_text_of_headlines_has_no_names(kept_of):
    assert kept_of(f"we saw. {'THIS IS ALL IN CAPITAL LETTERS. ' * 9}") == []


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_can_be_left_unprotected(kept_of, kind):
    words = {"numbers": "42", "names": "Anna", "code": "a_b", "quotes": '"so'}
    found = kept_of('we saw 42 of Anna or a_b "so it is" then', Protection(KINDS - {kind}))
    assert words[kind] not in found
    assert {one for other, one in words.items() if other != kind} <= set(found)


def test_quotes_do_not_go_beyond_a_line_or_300_characters(kept_of):
    assert kept_of(f'a "b\nc d "{"e " * 200}" f') == []
    assert kept_of(f'a "{"e " * 100}" f') == ['"e', *"e" * 99, '"']


def test_the_first_token_and_all_marks_are_kept(prompt):
    found = prompt("some words</s>more of them, and then the last line of this text")
    marks = [at for at, word in enumerate(found.words) if not word]
    assert marks == [0, 3]
    assert found.is_protected[marks].all()
    assert not found.is_protected[[1, 2]].any()


def test_patterns_keep_the_words_that_they_match(kept_of):
    patterns = Pattern(r"order [a-z]{3}\b"), Pattern("(?i)URGENT")
    text = "an order abc is urgent, an order abcd is not"
    assert kept_of(text, Protection(frozenset(), patterns)) == ["order", "abc", "urgent,"]


def test_every_word_of_a_prompt_may_be_protected(prompt):
    found = prompt("<s></s>")
    assert found.is_protected.all()


HOSTILE = (
    *(
        "`",
        '"',
        ' "a',
        " A",
        " _",
        "\n",
        " \n",
        "```",
        " ~~~",
        "User:\n",
        "\nUser: a",
        "\n####",
        ".",
    ),
    *(
        "USER:",
        "[INST]",
        " a.",
        ")",
        " a@",
        "a",
        "😀",
        "我",
        " I",
        "“a ",
        " x\n\n",
        "<s>",
        " 1",
        "a`",
    ),
    *(" <|", " a:", " ::", "\t", " <|user|>", "\n#  #"),
)


@pytest.mark.parametrize("piece", HOSTILE)
def test_no_text_takes_long(prompt, piece):
    """20,000 tokens take 20 to 100 ms; a search that is not linear takes many seconds."""
    patterns = (Pattern(r"\w+@\w+"), Pattern("(?i)(foo|bar)s?"))
    text = piece * (20_000 // len(piece.encode()))
    prompt(text)  # reads the tokens' texts
    started = time.thread_time()
    prompt(text, Protection(patterns=patterns))
    assert time.thread_time() - started < 2
