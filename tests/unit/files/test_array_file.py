"""Files of arrays: what every numpy that is allowed writes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.files.array_file import read_arrays, write_arrays

ARRAYS = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.int32)}


def test_every_keyword_of_savez_is_an_array(tmp_path, monkeypatch):
    savez = np.savez

    def before_numpy_2_2(file, **arrays):
        assert all(isinstance(array, np.ndarray) for array in arrays.values())
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", before_numpy_2_2)
    write_arrays(tmp_path / "file.npz", {"step": 3}, ARRAYS)
    about, found = read_arrays(tmp_path / "file.npz", 1000)
    assert about == {"step": 3}
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)


def test_objects_are_refused(tmp_path):
    with pytest.raises(TypeError, match="the array a has Python objects, expected numbers"):
        write_arrays(tmp_path / "file.npz", {}, {"a": np.array([None])})
    assert not list(tmp_path.iterdir())
