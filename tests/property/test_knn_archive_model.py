"""The archive against a dictionary, through adding, forgetting, deaths and reopening."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from archived import BINDING, assert_holds, record, record_id
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from soak import scale

from llmaas_plugins.knn_lm.archive import archive as archive_module
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.record import PAGE


class Modeled(RuleBasedStateMachine):
    """Conversations that enter and leave small segments."""

    directory = None  # set by the test
    opened = itertools.count()

    @initialize()
    def begin(self):
        self.path = self.directory / str(next(self.opened))
        self.held = {}  # records by number
        self.n_given = 0
        self.seeds = itertools.count()
        self.archive = Archive.open(self.path, BINDING, writable=True)

    @rule(n_tokens=st.integers(0, 200))
    def add(self, n_tokens):
        one = record(next(self.seeds), n_tokens=n_tokens)
        assert self.archive.append(one) == self.n_given
        self.held[self.n_given] = one
        self.n_given += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data):
        gone = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1, max_size=3))
        ids = [record_id(self.held.pop(number)) for number in gone]
        forgotten = self.archive.forget([*ids, b"?" * 16])
        assert forgotten.n_conversations == len(gone)
        if not self.held:
            self.n_given = 0  # no number can be mistaken for a remaining one

    @rule()
    def reopen(self):
        self.archive.close()
        self.archive = Archive.open(self.path, BINDING, writable=True)

    @rule(share=st.floats(0, 0.999))
    def die_while_adding(self, share):
        """Truncate the newly added bytes of the record's file to this share."""
        before = self.sizes()
        self.archive.append(record(next(self.seeds), n_tokens=30))
        self.archive.close()
        for name, n_bytes in self.sizes().items():
            old = before.get(name, PAGE)
            if n_bytes > old:
                os.truncate(self.path / name, old + int((n_bytes - old) * share))
        self.archive = Archive.open(self.path, BINDING, writable=True)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def read_any(self, data):
        records = [self.held[number] for number in sorted(self.held)]
        keys = np.concatenate([one.pairs.keys for one in records])
        if len(keys):
            wanted = data.draw(st.lists(st.integers(0, len(keys) - 1), max_size=20))
            found = self.archive.pairs(np.array(wanted, np.int64))
            assert np.array_equal(found.keys, keys[wanted])

    def sizes(self):
        return {path.name: path.stat().st_size for path in self.path.glob("*.segment")}

    @invariant()
    def it_is_the_dictionary(self):
        if not hasattr(self, "archive"):
            return
        records = [self.held[number] for number in sorted(self.held)]
        for archive in (self.archive, looking := Archive.open(self.path)):
            assert_holds(archive, records)
            assert [info.number for info in archive.conversations()] == sorted(self.held)
        looking.close()
        assert {path.suffix for path in self.path.iterdir()} <= {"", ".segment"}

    def teardown(self):
        if hasattr(self, "archive"):
            self.archive.close()


LIMITS = settings(
    max_examples=scale(40, 1000),
    stateful_step_count=scale(25, 60),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
def test_archive_is_a_dictionary(tmp_path, monkeypatch):
    monkeypatch.setattr(Modeled, "directory", tmp_path)
    monkeypatch.setattr(archive_module, "_MOST_SEGMENT_BYTES", 8 * PAGE)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power failure is simulated
    run_state_machine_as_test(Modeled, settings=LIMITS)
