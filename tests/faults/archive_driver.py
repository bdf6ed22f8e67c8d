"""An archive's life with one fault at each operation in turn; see ``injection.py``."""

from __future__ import annotations

import numpy as np
from archived import BINDING, assert_holds, record, record_id
from injection import drive

from llmaas_plugins.knn_lm.archive import archive as archive_module
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.record import PAGE

SEEDS = range(6)
LIFE = [
    ("add", [0, 1, 2]),
    ("forget", [1]),
    ("look", []),
    ("add", [3, 4]),
    ("forget", [0, 3]),
    ("forget", [2]),
    ("add", [5]),
]
GONE, LEFT = {0, 1, 2, 3}, [4, 5]
IDS = {record_id(record(seed)): seed for seed in SEEDS}


def ids(seeds):
    return [record_id(record(seed)) for seed in seeds]


def life(directory):
    """Run the life; yield the part and the number of conversations added in it after each step."""
    for part, (what, seeds) in enumerate(LIFE):
        with Archive.open(directory, BINDING, writable=what != "look") as archive:
            if what == "add":
                for n_added, seed in enumerate(seeds, 1):
                    archive.append(record(seed))
                    yield {"part": part, "n_added": n_added}
            elif what == "forget":
                archive.forget(ids(seeds))
            else:
                archive.conversations()
                archive.pairs(np.arange(archive.n_pairs))
        yield {"part": part + 1, "n_added": 0}


def expected(steps):
    """Return the conversations that must be there and those that may be there."""
    at = steps[-1] if steps else {"part": 0, "n_added": 0}
    there = set()
    for what, seeds in LIFE[: at["part"]]:
        there = there | set(seeds) if what == "add" else there - set(seeds)
    what, seeds = LIFE[at["part"]] if at["part"] < len(LIFE) else ("look", [])
    if what == "add":
        there |= set(seeds[: at["n_added"]])
        return there, there | set(seeds[: at["n_added"] + 1])
    return (there - set(seeds), there) if what == "forget" else (there, there)


def examine(directory, steps, _ending):
    """Check the surviving archive, use it further, and return a description of any problem."""
    must, may = expected(steps)
    if must or (directory / "lock").exists():
        with Archive.open(directory) as archive:
            found = [IDS[id_] for id_ in archive.ids()]
            assert_holds(archive, [record(seed) for seed in found])
        if not must <= set(found) <= may:
            yield f"found {found}, expected {sorted(must)}, and at most {sorted(may)}"
    with Archive.open(directory, BINDING, writable=True) as archive:
        archive.forget(ids(GONE))
        for seed in LEFT:
            if record_id(record(seed)) not in archive:
                archive.append(record(seed))
    with Archive.open(directory) as archive:
        assert_holds(archive, [record(seed) for seed in LEFT])
    files = list(directory.iterdir())
    content = b"".join(path.read_bytes() for path in files)
    if any(f"question {seed}:".encode() in content for seed in GONE):
        yield "what was forgotten is still there"
    if any(path.suffix not in ("", ".segment") for path in files):
        yield f"left over: {sorted(path.name for path in files)}"


if __name__ == "__main__":
    archive_module._MOST_SEGMENT_BYTES = 5 * PAGE  # two records
    drive(life, lambda _fault, _whole: examine)
