"""A process that is killed while requests run leaves the gains of some seconds before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import fork_server

from llmaas_plugins.knn_lm.archive.files import EVIDENCE, SELECTED
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.evidence import Evidence

SUPPORT = Path(__file__).parents[3] / "support"
SCRIPT = """
import itertools, sys, time
from mixed_requests import mixing_engine, tokens_of
from llmaas_plugins.knn_lm.mixing import saving

model, store, every_s = sys.argv[1:]
saving.EVERY_S = float(every_s)
with mixing_engine(model, store, look_back=48) as (suite, llama):
    for question in itertools.cycle(("Where does Bruno sleep?", "When is the boat to work?")):
        stream = llama.generate(tokens_of(llama, question), temp=0.0)
        for _ in zip(range(8), stream):
            pass
        stream.close()
        print(suite.status()["plugins"]["knn_lm"]["remembered_gains"], flush=True)
"""


def test_gains_of_a_killed_process_are_not_lost(reference_model, store):
    environ = os.environ | {"PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-c", SCRIPT, str(reference_model), str(store), "0.2"]
    with fork_server.Process(command, stdout=subprocess.PIPE, env=environ, text=True) as process:
        n_remembered = int(process.stdout.readline())
        known_s = time.monotonic()
        while time.monotonic() < known_s + 1.0:  # it goes on to ask
            assert process.stdout.readline()
        process.kill()
    evidence, datastore = Evidence(store / EVIDENCE), Datastore.open(store / SELECTED, None)
    assert evidence.bind(datastore.digest)
    assert len(evidence) >= n_remembered > 0
