"""Traces of calls to many contexts (LLMS §4), for others to replay too.

A trace is a JSONL file. Its first line is a header with the format's version and every setting, the
others are calls in order of time. Token counts are what a replay goes by; texts are there if the
data sets were.
"""

from __future__ import annotations

from llmaas_eval.traces.families import FAMILIES, Family
from llmaas_eval.traces.files import read_trace, write_trace
from llmaas_eval.traces.generate import PATTERNS, Settings, generate
from llmaas_eval.traces.types import Call, Trace

__all__ = [
    "FAMILIES",
    "PATTERNS",
    "Call",
    "Family",
    "Settings",
    "Trace",
    "generate",
    "read_trace",
    "write_trace",
]
