"""Shares that ``llmaas flash distill`` keeps with its progress."""

from __future__ import annotations

import numpy as np
import pytest

from llmaas_plugins.cli.flash.sharing import kept_steps, shares_of, steps_of
from llmaas_plugins.elastic.checkpoint import Checkpoint, fingerprint_of
from llmaas_plugins.flash_weights.shares import SPARSITIES, equal_share

IDENTITY = {"model": "a", "text": [[1, 2]], "packaged": {}}
STEPS = steps_of({"one": equal_share(), "two": equal_share()})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "shares.progress"
    assert np.array_equal(kept_steps(path, IDENTITY, 2, lambda: STEPS), STEPS)
    return path


def test_shares_are_measured_once(path):
    found = kept_steps(path, IDENTITY, 2, lambda: pytest.fail("measured again"))
    assert np.array_equal(found, STEPS)
    assert all(np.array_equal(share, equal_share()) for share in shares_of(found))


def test_shares_of_another_text_are_measured(path):
    other = STEPS - 1
    found = kept_steps(path, IDENTITY | {"text": [[1, 3]]}, 2, lambda: other)
    assert np.array_equal(found, other)


def test_a_damaged_file_is_measured_again(path):
    path.write_bytes(path.read_bytes()[:-1])
    assert np.array_equal(kept_steps(path, IDENTITY, 2, lambda: STEPS), STEPS)
    assert kept_steps(path, IDENTITY, 2, lambda: pytest.fail("measured again")) is not None


@pytest.mark.parametrize(
    "steps",
    [
        STEPS[:1],
        STEPS[:, 1:],
        STEPS.astype(np.int64),
        STEPS - 10,
        STEPS + 1,
        STEPS[:, ::-1],
        np.zeros((2, len(SPARSITIES), 1), np.int32),
    ],
    ids=["rows", "columns", "type", "negative", "too large", "descending", "dimensions"],
)
def test_what_can_be_no_shares_is_measured_again(path, steps):
    kept = Checkpoint(path, fingerprint_of(IDENTITY))
    kept.keep({"steps": np.ascontiguousarray(steps)})
    kept.save()
    assert np.array_equal(kept_steps(path, IDENTITY, 2, lambda: STEPS), STEPS)
