"""A selected datastore of 600 pairs, written once for all tests that use a copy of it."""

from __future__ import annotations

import shutil

import pytest
from selected import pairs

from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.pca import fit_basis


@pytest.fixture(scope="session", params=[None, 16], ids=["all dimensions", "sixteen directions"])
def original(request, tmp_path_factory):
    """Return a datastore and its source; tests only read them."""
    path, made_of = tmp_path_factory.mktemp("original") / "datastore.knn", pairs()
    basis = request.param and fit_basis(made_of["keys"], request.param)
    Datastore.write(path, basis=basis, **made_of)
    return path, made_of


@pytest.fixture
def path(tmp_path):
    return tmp_path / "datastore.knn"


@pytest.fixture
def written(original, path):
    """Return a copy of the datastore, and its source."""
    shutil.copy(original[0], path)
    return path, dict(original[1])
