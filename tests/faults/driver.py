"""A store's life, with one fault at each operation in turn; run it with ``faults.c`` preloaded.

``python driver.py LIBRARY FOLDER FAULT STEP FIRST`` prints what it did and found, as JSON. For each
point a child lives the life and meets the fault; then this process, which never saw that store,
opens what is left.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from store_life import DISK, ROOT, E, life, load, open_store, save

from llmaas_hooks import StoreError

NEVER = 1 << 40

FAULTS = {  # what the library is told, and whether it goes on
    "ENOSPC": (errno.ENOSPC, False),
    "EIO": (errno.EIO, False),
    "EDQUOT": (errno.EDQUOT, False),
    "full from then on": (errno.ENOSPC, True),
    "broken from then on": (errno.EIO, True),
    "no holes": (errno.EOPNOTSUPP, False),
    "short": (-1, False),
    "torn between blocks": (-2, False),
    "torn anywhere": (-3, False),
    "killed before": (-4, False),
    "killed after": (-5, False),
    "power cut": (-6, False),
    "power cut, some written": (-7, False),
}
POWER = {"power cut", "power cut, some written"}


def child(directory, out, life):
    """Live, telling the parent of each step; ends with the process."""
    log = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("llmaas").addHandler(handler)
    ending = {"end": "closed"}
    try:
        for step in life(directory):
            out.write(json.dumps(step) + "\n")
            out.flush()
    except StoreError as error:
        ending = {"end": "refused", "why": str(error)}
    except BaseException as error:
        ending = {"end": "raised", "why": repr(error)}
    out.write(json.dumps(ending | {"log": log}) + "\n")
    out.flush()
    os._exit(0)


def lived(library, directory, fault, point, life):
    """What a child told: its steps, its ending if it had one, and how many operations it did."""
    reading, writing = os.pipe()
    kind, sticky = FAULTS[fault]
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        library.faults_arm(os.fsencode(directory), kind, point, int(sticky), point)
        child(directory, os.fdopen(writing, "w"), life)
    os.close(writing)
    with os.fdopen(reading) as lines:
        told = [json.loads(line) for line in lines]
    os.waitpid(pid, 0)
    ending = told.pop() if told and "end" in told[-1] else None
    return told, ending


def must_be_there(steps, ending, fault, whole):
    """Keys that nothing allows to be missing."""
    if fault in POWER:
        return set()
    if FAULTS[fault][1] and (any(step["counted"] for step in steps) or ending is None):
        return set()  # it was told that nothing could be committed any more
    done = set(steps[-1]["keys"]) if steps else set()
    if ending is not None and ending["end"] == "closed":
        return done  # a single failure is made up for by the next commit
    return done & set(whole[len(steps)]["keys"]) if len(steps) < len(whole) else done


def examine(directory, wanted):
    """Open what is left, in a process that never saw it; what is wrong with it."""
    store = open_store(directory)
    there = load(store, list(store.tree))
    missing = wanted - {key.hex() for key in there}
    if missing:
        yield f"{len(missing)} committed chunks are gone"
    if (directory / "chunks.slab").stat().st_size > DISK:
        yield "the slab outgrew its budget"
    save(store, E, "e")
    store.close()
    store = open_store(directory)
    path, n_tokens = store.match(ROOT, E)
    if n_tokens != len(E) or len(load(store, path)) != len(path):
        yield "a new context does not come back"
    if store.stats()["faults"] or set(store.tree.contexts()) < {"e"}:
        yield f"still damaged: {store.stats()}"
    store.close()


def problems_at(library, directory, fault, point, whole):
    steps, ending = lived(library, directory, fault, point, life)
    if ending is None and FAULTS[fault][0] > -2:
        yield "the process died"
    if ending is not None and ending["end"] == "raised":
        yield f"it raised {ending['why']}"
    if ending is not None and any(step["counted"] for step in steps) and not ending["log"]:
        yield "an error was counted and not logged"
    library.faults_arm(os.fsencode(directory), 0, NEVER, 0, 0)  # fsync is not needed here
    try:
        yield from examine(directory, must_be_there(steps, ending, fault, whole))
    except Exception as error:
        yield f"afterwards: {error!r}"
    library.faults_disarm()


def main():
    library, folder, fault = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    library.faults_op.restype = ctypes.c_char_p
    directory = folder / "whole"
    library.faults_arm(os.fsencode(directory), 0, NEVER, 0, 0)
    whole = list(life(directory))
    n_ops = library.faults_disarm()
    ops = collections.Counter(library.faults_op(i).decode() for i in range(n_ops))
    found, points = [], range(int(sys.argv[5]), n_ops, int(sys.argv[4]))
    for point in points:
        directory = folder / f"at-{point}"
        said = list(problems_at(library, directory, fault, point, whole))
        found += [f"{fault} at operation {point}: {problem}" for problem in said]
        if not said:
            shutil.rmtree(directory, ignore_errors=True)
    json.dump({"points": len(points), "ops": ops, "problems": found}, sys.stdout)


if __name__ == "__main__":
    main()
