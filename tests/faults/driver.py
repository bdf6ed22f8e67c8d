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

import numpy as np
from stored_chunks import encoder, payload

from llmaas_hooks import StoreError
from llmaas_plugins._native import Budget, Codec, KVGeometry, chunk_bound
from llmaas_plugins.kv_chunks.disk import DiskStore
from llmaas_plugins.kv_chunks.extents import PAGE
from llmaas_plugins.kv_chunks.keys import chain
from llmaas_plugins.kv_chunks.store import ChunkStore

ROOT = b"r" * 32
GEOM = KVGeometry(1, False, 1, 1, (64,), (64,))  # a chunk is one page
BOUND = chunk_bound(GEOM, Codec.RAW, 16)
RAM, DISK = 9 * PAGE, 13 * PAGE
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


def text(*parts):
    return np.concatenate([np.arange(a, a + n, dtype=np.int32) for a, n in parts])


A, B, C = text((0, 70)), text((0, 32), (500, 30)), text((1000, 90))
D, E = text((2000, 16 * 8)), text((3000, 48))


def open_store(directory):
    return ChunkStore(Budget(RAM), DiskStore(directory, DISK))


def save(store, tokens, name):
    ids = chain(ROOT, tokens)
    for i in store.missing(ids):
        if not store.put(ids[i], BOUND, encoder(GEOM, ids[i]), is_first=i == 0):
            break
    store.touch(ids)
    store.set_head(name, ids)


def load(store, chunks):
    """Keys of the chunks that could be had one by one; they must be what was put."""
    keys = set()
    for chunk in chunks:
        for address in store.fetch([chunk]):
            if ctypes.string_at(address, chunk.size) != payload(GEOM, chunk.id):
                raise AssertionError(f"wrong payload for {chunk.id}")
            keys.add(chunk.id.key)
            store.release([chunk])
    return keys


def state(store):
    """What is on disk, as far as the store knows."""
    with store._shelf.lock:
        keys = [chunk.id.key.hex() for chunk in store.tree if chunk.disk >= 0]
        heads = {name: key.hex() for name, key in store.tree.contexts().items()}
        stats = store._shelf.counters
        return {"keys": keys, "heads": heads, "counted": stats.io_errors + stats.faults}


def life(directory):
    """Open, put, flush, evict for room, forget, reopen, load: yields what is on disk by then."""
    store = open_store(directory)
    store.set_layout(ROOT, '{"n_layer": 1}')
    yield state(store)
    for tokens, name in ((A, "a"), (B, "b"), (C, "c")):
        save(store, tokens, name)
        store.flush()
        yield state(store)
    load(store, store.match(ROOT, A).path)
    store.evict_context("b")
    yield state(store)
    store.close()
    store = open_store(directory)
    counted = state(store)["counted"]
    load(store, store.match(ROOT, C).path)
    store.touch(chain(ROOT, A))
    save(store, D, "d")
    store.flush()
    yield state(store)
    store.evict_context("a")
    last = state(store)
    store.close()
    yield last | {"counted": last["counted"] + counted}


def child(directory, out):
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


def lived(library, directory, fault, point):
    """What a child told: its steps, its ending if it had one, and how many operations it did."""
    reading, writing = os.pipe()
    kind, sticky = FAULTS[fault]
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        library.faults_arm(os.fsencode(directory), kind, point, int(sticky), point)
        child(directory, os.fdopen(writing, "w"))
    os.close(writing)
    with os.fdopen(reading) as lines:
        told = [json.loads(line) for line in lines]
    os.waitpid(pid, 0)
    ending = told.pop() if told and "end" in told[-1] else None
    return told, ending


def must_be_there(steps, ending, fault, whole):
    """Keys that nothing allows to be missing."""
    if fault in POWER or (ending is not None and ending["end"] != "closed"):
        return set()
    if ending is not None:
        return set() if any(step["counted"] for step in steps) else set(steps[-1]["keys"])
    done = set(steps[-1]["keys"]) if steps else set()
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
    steps, ending = lived(library, directory, fault, point)
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
