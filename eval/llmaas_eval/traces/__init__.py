"""Traces of calls to many contexts (LLMS §4), in a format that other programs can replay too.

A trace is a JSONL file. Its first line is a header with the format's version and all settings. The
other lines are calls in order of time. A replay needs only their token counts; calls have texts
only if the data sets were given.
"""

from __future__ import annotations

from llmaas_eval.traces.families import FAMILIES, Family
from llmaas_eval.traces.files import read_trace, write_trace
from llmaas_eval.traces.generate import PATTERNS, Settings, generate
from llmaas_eval.traces.types import Trace, TraceCall

__all__ = [
    "FAMILIES",
    "PATTERNS",
    "Family",
    "Settings",
    "Trace",
    "TraceCall",
    "generate",
    "read_trace",
    "write_trace",
]
