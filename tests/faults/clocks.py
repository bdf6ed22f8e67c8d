"""A store's life under a jumping wall clock; prints the store's contents after each step."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

import store_life

library = ctypes.CDLL(sys.argv[1])
library.faults_clock(ctypes.c_long(int(sys.argv[3])))
spread = {round(time.time() / 3600) for _ in range(4)}
steps = list(store_life.life(Path(sys.argv[2])))
json.dump({"steps": steps, "hours": len(spread)}, sys.stdout)
