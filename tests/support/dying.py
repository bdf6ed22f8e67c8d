"""An archive's writer that dies at each of its steps in turn.

``python dying.py STORE FOLDER SEGMENT_BYTES LIFE`` leaves in FOLDER/N what there is when LIFE, on a
copy of STORE, was killed at its Nth change to a file. A write is killed half done.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

from archived import BINDING, record, record_id

from llmaas_plugins.knn_lm import archive as archive_module
from llmaas_plugins.knn_lm.archive import Archive

KEPT, GONE = [0, 2, 3, 6], [1, 4, 5]  # among one another; only GONE; only KEPT
ADDED = [10, 11, 12]
CHANGES = ("pwrite", "ftruncate", "fsync", "rename", "unlink")


def forget(store):
    with Archive.open(store, writable=True) as archive:
        archive.forget([record_id(record(seed)) for seed in GONE])


def add(store):
    with Archive.open(store, BINDING, writable=True) as archive:
        for seed in ADDED:
            archive.append(record(seed))


def arm(point):
    steps = itertools.count()

    def dying(name, change):
        def call(*args):
            if next(steps) == point:
                if name == "pwrite":
                    change(args[0], args[1][: len(args[1]) // 2], args[2])
                os._exit(1)
            return None if name == "fsync" else change(*args)  # nobody pulls the plug

        return call

    for name in CHANGES:
        setattr(os, name, dying(name, getattr(os, name)))


def main():
    store, folder, n_bytes, life = sys.argv[1:]
    archive_module._MOST_SEGMENT_BYTES = int(n_bytes)
    for point in itertools.count():
        shutil.copytree(store, copy := Path(folder) / str(point))
        pid = os.fork()
        if pid == 0:
            arm(point)
            {"forget": forget, "add": add}[life](copy)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) == 0:  # it lived
            return


if __name__ == "__main__":
    main()
