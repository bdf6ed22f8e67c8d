"""Draw files by chance, and print their longest sentences, so that a reader can judge the voice.

    python -m llmaas_eval.house.draw [COMMIT]

The commit (default: HEAD) is the seed, so nobody can choose the files.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmaas_eval.house.prose import passages
from llmaas_eval.house.voice import sentences, tracked_files

__all__ = ["drawn", "longest", "main"]

_N_FILES, _N_SENTENCES = 20, 5
_LEAST = 10
"""Files with fewer sentences say too little."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the drawn files and their longest sentences; return the exit status."""
    (commit,) = list(sys.argv[1:] if arguments is None else arguments) or ["HEAD"]
    command = ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, check=True, text=True)  # noqa: S603
    for name in drawn(found.stdout.strip(), tracked_files()):
        sys.stdout.write(f"\n{name}\n")
        for line, sentence in longest(name):
            sys.stdout.write(f"  {line}: {sentence}\n")
    return 0


def drawn(seed: str, names: Sequence[str]) -> list[str]:
    """Return 20 of the files that have at least ten sentences, chosen by the seed."""
    speaking = [name for name in sorted(names) if sum(1 for _ in _said(name)) >= _LEAST]
    return sorted(random.Random(seed).sample(speaking, min(_N_FILES, len(speaking))))  # noqa: S311


def longest(name: str) -> list[tuple[int, str]]:
    """Return the line and text of a file's five longest sentences by words, longest first."""
    return sorted(_said(name), key=lambda said: -len(said[1].split()))[:_N_SENTENCES]


def _said(name: str) -> Iterator[tuple[int, str]]:
    for passage in passages(Path(name)):
        for sentence in sentences(passage.text):
            yield passage.line, sentence


if __name__ == "__main__":
    raise SystemExit(main())
