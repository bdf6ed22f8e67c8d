"""Low-rank terms of weights, random ones, and llama.cpp's own adapters that add the same terms."""

from __future__ import annotations

import re

import numpy as np

from llmaas_eval.models import finish, open_writer
from llmaas_hooks import LowRank
from llmaas_patches.native.claims import tensor_places
from llmaas_patches.native.library import load_library


def random_term(rng, rank, n_columns, n_rows, size=1.0):
    """Return a term whose products are about ``size`` times as large as their operands."""
    a = rng.normal(0, n_columns**-0.5, (rank, n_columns)).astype(np.float32)
    b = rng.normal(0, size * rank**-0.5, (n_rows, rank)).astype(np.float32)
    return LowRank.of(a, b)


def random_terms(path, pattern, *, rank=3, rows=None, columns=None, seed=0, size=0.5):
    """Return a term for each weight of a model that a pattern matches, by its name."""
    rng, terms = np.random.default_rng(seed), {}
    for name, (n_rows, n_columns) in _shapes(path).items():
        if re.fullmatch(pattern, name):
            terms[name] = random_term(rng, rank, columns or n_columns, rows or n_rows, size)
    assert terms
    return terms


def matrices_of(terms, path):
    """Return A and B of each term, filled up with zeros to the shape of the model's weight."""
    found, shapes = {}, _shapes(path)
    for name, term in terms.items():
        (n_rows, n_columns), (a, b) = shapes[name], term.floats()
        whole_a = np.zeros((term.rank, n_columns), np.float32)
        whole_b = np.zeros((n_rows, term.rank), np.float32)
        whole_a[:, : term.n_columns], whole_b[: term.n_rows] = a, b
        found[name] = whole_a, whole_b
    return found


def write_lora_of(matrices, path, arch="llama"):
    """Write an adapter for llama.cpp from A and B by weight name; return its path."""
    writer = open_writer(path, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 0.0)  # a scale of 1, whatever the rank
    for name, (a, b) in matrices.items():
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)
    return finish(writer, path)


def _shapes(path):
    places = tensor_places(load_library(), [path])
    return {name: place.info.shape[1::-1] for name, place in places.items()}
