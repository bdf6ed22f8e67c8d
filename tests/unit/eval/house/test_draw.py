"""The files that are drawn to judge the voice."""

from __future__ import annotations

from llmaas_eval.house import draw


def test_the_commit_draws_the_files(tmp_path):
    names = []
    for i in range(40):
        path = tmp_path / f"{i}.md"
        path.write_text("A sentence. " * (9 if i == 0 else 10 + i))
        names.append(str(path))
    found = draw.drawn("a" * 40, names)
    assert len(set(found)) == 20
    assert found == draw.drawn("a" * 40, names[::-1])
    assert found != draw.drawn("b" * 40, names)
    assert all(str(tmp_path / "0.md") not in draw.drawn(str(i), names) for i in range(50))


def test_the_longest_sentences_come_first(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("Short one.\n\nThis one is longer. One, two, three, four, five, six.\n" * 2)
    found = draw.longest(str(path))
    assert found[0] == (3, "One, two, three, four, five, six.")
    assert [len(text.split()) for _, text in found] == [6, 6, 4, 4, 2]
