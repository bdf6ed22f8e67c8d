"""The check of how sentences begin."""

from __future__ import annotations

import pytest

from llmaas_eval.house import voice

PYTHON = '''"""What a module is about.

Fine here. Likewise wrong.
"""

NAME = 1  # Of no use
# Of the first line of two,
# which the check joins


def function(path):
    """Return a file.

    Args:
        path: Of the file.
    """
    raise ValueError(f"What is {path}? Office hours. Whatever. Likewise {path}.")
'''
C = """/* Of a row. */
int a; // What it is
/* Two lines,
 * of which both are fine. Those of both. */
"""
MARKDOWN = """# What is a chunk?

A chunk. What it holds is said
here; of course. **Of note**: nothing.

```
Of code
```

- Likewise in a list
| Of a table | What |
"""


def found(tmp_path, name, text, capsys):
    path = tmp_path / name
    path.write_text(text)
    status = voice.main([str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert status == (1 if lines else 0)
    return [line.removeprefix(f"{path}:") for line in lines[:-1]]


def test_docstrings_comments_and_messages_of_python(tmp_path, capsys):
    assert sorted(found(tmp_path, "a.py", PYTHON, capsys)) == [
        "14: Of the file.",
        "17: Likewise ….",
        "1: What a module is about.",
        "3: Likewise wrong.",
        "6: Of no use",
        "7: Of the first line of two, which the check joins",
    ]


def test_comments_of_c(tmp_path, capsys):
    assert found(tmp_path, "a.c", C, capsys) == [
        "1: Of a row.",
        "2: What it is",
        "3: Those of both.",
    ]


def test_paragraphs_lists_and_tables_of_markdown(tmp_path, capsys):
    assert found(tmp_path, "a.md", MARKDOWN, capsys) == [
        "3: What it holds is said here; of course.",
        "3: Of note**: nothing.",
        "10: Likewise in a list",
        "11: Of a table | What",
    ]


@pytest.mark.parametrize("name", ["a.json", "a.gguf", "a"])
def test_other_files_hold_no_prose(tmp_path, capsys, name):
    assert found(tmp_path, name, "Of nothing", capsys) == []
