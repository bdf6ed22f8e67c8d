"""Find sentences that lack a subject.

    python -m llmaas_eval.house.voice [FILE …]

A sentence that begins with one of ``OPENINGS`` has no subject: "of each target: its share" says
less than "Return each target's share". Questions may begin with "What". Without arguments, all
files that git tracks are checked. Each finding is one line; the status is 1 if there are any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmaas_eval.house.prose import Passage, passages

__all__ = ["main", "sentences", "tracked_files", "wrong_openings"]

OPENINGS = ("Of", "Those of", "That of", "What", "Likewise", "As it was", "As ever", "None:")
_OPENING = re.compile(rf"({'|'.join(OPENINGS)})(?![\w-])")
_LEFT_OUT = (
    "LICENSE",
    "NOTICE",
    "eval/llmaas_eval/house/voice.py",  # itself, and its test
    "llmaas_plugins/demo/conversations/",
    "tests/data/",
    "tests/unit/eval/house/test_voice.py",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings in these files, or in the whole repository; return the exit status."""
    names = list(sys.argv[1:] if arguments is None else arguments) or tracked_files()
    found = 0
    for name in names:
        for line, sentence in wrong_openings(passages(Path(name))):
            found += 1
            sys.stdout.write(f"{name}:{line}: {sentence[:100]}\n")
    if found:
        sys.stdout.write(f"{found} sentences begin with {', '.join(OPENINGS)}: name the subject.\n")
    return 1 if found else 0


def wrong_openings(found: Iterator[Passage]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each sentence with a wrong opening."""
    for passage in found:
        for sentence in sentences(passage.text):
            if _OPENING.match(sentence) and not sentence.endswith("?"):
                yield passage.line, sentence


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a passage, each in one line."""
    flat = re.sub(r"\s+", " ", text)
    for sentence in re.split(r"(?<=[.!?:])\s+(?=[`*_\"'(]*[A-Z])", flat):
        yield sentence.lstrip("`*_\"'( ")


def tracked_files() -> list[str]:
    """Return the names of the files that git tracks and that we wrote for people."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True)  # noqa: S607
    names = listed.stdout.decode().split("\0")
    return [name for name in names if name and not name.startswith(_LEFT_OUT)]


if __name__ == "__main__":
    raise SystemExit(main())
