"""A store's life with one fault at each operation in turn; see ``injection.py``."""

from __future__ import annotations

from injection import FAULTS, drive
from store_life import DISK, ROOT, E, life, load, open_store, save

POWER = {"power cut", "power cut, some written"}


def must_be_there(steps, ending, fault, whole):
    """Return the keys that must have survived the fault."""
    if fault in POWER:
        return set()
    if FAULTS[fault][1] and (any(step["counted"] for step in steps) or ending is None):
        return set()  # the store was told that no commit was possible any more
    done = set(steps[-1]["keys"]) if steps else set()
    if ending is not None and ending["end"] == "closed":
        return done  # the next commit makes up for a single failure
    return done & set(whole[len(steps)]["keys"]) if len(steps) < len(whole) else done


def examine(directory, wanted):
    """Open the surviving store in a process that never saw it, and describe any problem."""
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


def examine_after(fault, whole):
    def look(directory, steps, ending):
        if ending is not None and any(step["counted"] for step in steps) and not ending["log"]:
            yield "an error was counted and not logged"
        yield from examine(directory, must_be_there(steps, ending, fault, whole))

    return look


if __name__ == "__main__":
    drive(life, examine_after)
