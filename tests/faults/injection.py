"""A life with one fault at each file operation in turn; runs with ``faults.c`` preloaded.

For each fault point a child process lives the life and meets the fault. This process, which
never saw that store, then opens the surviving files. A driver is run as
``python DRIVER LIBRARY FOLDER FAULT STEP FIRST`` and prints its actions and findings as JSON.
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

from llmaas_hooks import StoreError

NEVER = 1 << 40

FAULTS = {  # arguments of the library, and whether the life continues after the fault
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


def child(directory, out, life):
    """Live, report each step to the parent, and end the process."""
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
    """Return a child's steps, its ending if it reported one, and its number of file operations."""
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


def problems_of(library, directory, fault, told, examine):
    steps, ending = told
    if ending is None and FAULTS[fault][0] > -2:
        yield "the process died"
    if ending is not None and ending["end"] == "raised":
        yield f"it raised {ending['why']}"
    library.faults_arm(os.fsencode(directory), 0, NEVER, 0, 0)  # fsync is not needed here
    try:
        yield from examine(directory, steps, ending)
    except Exception as error:
        yield f"afterwards: {error!r}"
    library.faults_disarm()


def drive(life, examine_after):
    """Run a driver's main program.

    ``examine_after(fault, whole)`` returns the function that checks the surviving files, given the
    directory, the reported steps, and the ending if there was one. ``whole`` are the steps of a
    life
    without faults.
    """
    library, folder, fault = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    library.faults_op.restype = ctypes.c_char_p
    directory = folder / "whole"
    library.faults_arm(os.fsencode(directory), 0, NEVER, 0, 0)
    examine = examine_after(fault, list(life(directory)))
    n_ops = library.faults_disarm()
    ops = collections.Counter(library.faults_op(i).decode() for i in range(n_ops))
    found, points = [], range(int(sys.argv[5]), n_ops, int(sys.argv[4]))
    for point in points:
        directory = folder / f"at-{point}"
        told = lived(library, directory, fault, point, life)
        said = list(problems_of(library, directory, fault, told, examine))
        found += [f"{fault} at operation {point}: {problem}" for problem in said]
        if not said:
            shutil.rmtree(directory, ignore_errors=True)
    json.dump({"points": len(points), "ops": ops, "problems": found}, sys.stdout)
