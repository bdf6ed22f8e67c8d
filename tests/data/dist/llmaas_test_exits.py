"""A script that somebody named as a plugin."""

from __future__ import annotations

import sys

sys.exit("usage: llmaas_test_exits FILE")
