"""Products of matrices on one thread while another thread forks: OpenBLAS alone would hang."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from soak import scale

SCRIPT = """
import os, threading, time
import numpy as np
from llmaas_plugins.knn_lm.datastore.distances import squared_distances
from llmaas_plugins.knn_lm.datastore.pca import fit_basis

keys = np.random.default_rng(0).random((300, 256), np.float32)
n_products, is_over = 0, threading.Event()

def work():
    global n_products
    while not is_over.is_set():
        squared_distances(fit_basis(keys, 64).project(keys), keys[:, :64])
        n_products += 1

thread = threading.Thread(target=work, daemon=True)
thread.start()
for _ in range(FORKS):
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.001)
is_over.set()
thread.join(20)
print(n_products if not thread.is_alive() else "a product never ended", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.soak
def test_forks_wait_for_products():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("FORKS", str(scale(50, 2000)))],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=scale(100, 2000),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit(), done.stdout
