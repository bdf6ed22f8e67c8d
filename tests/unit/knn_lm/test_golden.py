"""A datastore's files of the first formats: every later version opens them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import FORGOTTEN, ONLINE, SELECTED
from llmaas_plugins.knn_lm.archive.suppression import SuppressionList
from llmaas_plugins.knn_lm.build.archive_source import SelectionParams
from llmaas_plugins.knn_lm.build.update_datastore import is_update_due
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.datastore.metadata import DatastoreMetadata
from llmaas_plugins.knn_lm.datastore.summary import read_summary

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
FINGERPRINT = bytes(range(32))
FIRST, _, LAST = IDS = (
    "12cbc6f43eac9181c49e6572492b2280",
    "92bdfefe8d5d2731ea1f3cdb3f6280e5",
    "aae5f157f21681a0255b4a00568b8f41",
)


@pytest.fixture
def folder(tmp_path):
    """Return a directory with the files that one version of the plugin wrote together."""
    names = {
        "v1.segment": "000000.0.segment",
        "v1-datastore.knn": SELECTED,
        "v1-online.npz": ONLINE,
        "v1-forgotten": FORGOTTEN,
    }
    for golden, name in names.items():
        shutil.copyfile(GOLDEN / golden, tmp_path / name)
    return tmp_path


def test_names_of_before_they_were_american_are_read():
    text = {"conversations": ["a"], "settings": {}, "rows_per_neighbour": 2.5, "owners": [None]}
    encoded = np.frombuffer(json.dumps(text).encode(), np.uint8)
    file = SimpleNamespace(path=Path("old.knn"), read={"text": encoded}.__getitem__)
    assert DatastoreMetadata.read(file).rows_per_neighbor == 2.5


def test_selected_datastore_of_format_1_is_searched(folder):
    datastore = Datastore.open(folder / SELECTED, FINGERPRINT)
    found = datastore.search(np.zeros(6, np.float32), 3)
    datastore.close()
    assert len(datastore) == 24
    assert datastore.conversations == (FIRST, LAST)
    assert datastore.ranges_for("notes") == (range(24),)
    assert datastore.ranges_for("mail") == ()
    assert found.values.tolist() == [150, 143, 43]
    assert found.distances.tolist() == [0.859375, 1.421875, 5.546875]
    assert found.weights.tolist() == pytest.approx([3.0158617, 3.0458038, 3.934832])
    assert datastore.settings == {
        "mixture": {"alpha": 0.0, "beta": 0.0, "theta": 25.41, "far": None},
        "k": 4,
        "skip_above": 0.5,
        "key": "final_norm",
        "level": 1.0,
    }


def test_selected_datastore_of_format_1_is_described(folder):
    selected = read_summary(folder)
    assert selected.fingerprint == FINGERPRINT
    assert selected.n_pairs == 24
    assert selected.positions_in(FIRST).tolist() == [5, 6]
    assert selected.positions_in(LAST)[:5].tolist() == [2, 3, 5, 9, 19]


def test_update_goes_on_from_a_state_of_the_first_version(folder):
    plan = SelectionParams(size=24, k=4, n_dims=4)
    with Archive.open(folder) as archive:
        assert [id_.hex() for id_ in archive.ids()] == list(IDS)
        assert not is_update_due(archive, plan)
        (folder / ONLINE).unlink()
        assert is_update_due(archive, plan)


def test_forgotten_conversations_of_the_first_version_are_known(folder):
    forgotten = SuppressionList(folder)
    assert bytes([7]) * 16 in forgotten
    assert bytes([8]) * 16 not in forgotten
