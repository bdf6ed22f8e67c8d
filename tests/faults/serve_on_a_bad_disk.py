"""``llmaas serve`` with ``native/tests/faults.c`` preloaded: the store's disk fails now and then.

Faults begin at SIGUSR1, because a store that cannot be opened at the start is refused. The first
argument is the store's folder; the others are ``llmaas``'s own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import sys
import threading
import time

from llmaas_plugins.cli.main import main

SHORT = -1
FAULTS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, SHORT)


def fail_now_and_then(folder):
    """Arm a fault at one of the next operations, or from there on; disarm it after a while."""
    library, rng = ctypes.CDLL(os.environ["LD_PRELOAD"]), random.Random()
    while True:
        time.sleep(rng.uniform(0.0, 1.0))
        kind, at, lasts = rng.choice(FAULTS), rng.randrange(20), rng.random() < 0.3
        library.faults_arm(folder.encode(), kind, ctypes.c_long(at), int(lasts), ctypes.c_ulong(0))
        time.sleep(rng.uniform(0.1, 0.5))
        library.faults_disarm()


faults = threading.Thread(target=fail_now_and_then, args=(sys.argv.pop(1),), daemon=True)
signal.signal(signal.SIGUSR1, lambda *_: faults.start())
sys.exit(main())
