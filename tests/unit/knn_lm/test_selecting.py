"""From an archive to a selected datastore: the origin of keys, and the held-out data."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from archived import BINDING, N_EMBD, fill, record
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import scale

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.archive.archive import Archive
from llmaas_plugins.knn_lm.archive.files import ONLINE, SELECTED
from llmaas_plugins.knn_lm.build import held_out
from llmaas_plugins.knn_lm.build.archive_source import (
    SelectionParams,
    archive_source,
    initial_objective,
)
from llmaas_plugins.knn_lm.build.build_datastore import build_datastore, fit_and_write
from llmaas_plugins.knn_lm.build.encoder import _windows
from llmaas_plugins.knn_lm.build.held_out import held_out_targets
from llmaas_plugins.knn_lm.build.update_datastore import update_datastore
from llmaas_plugins.knn_lm.datastore import writer
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.selection.algorithms import Selection, offline

N_CHATS = 12
IN_ALL = SelectionParams(size=90, k=6, n_dims=N_EMBD)


@pytest.fixture
def archive(tmp_path):
    fill(tmp_path, [record(seed, n_tokens=20) for seed in range(N_CHATS)])
    with Archive.open(tmp_path, BINDING, writable=True) as archive:
        yield archive


def infos(archive):
    return {info.number: info for info in archive.conversations()}


def selected(archive, plan=IN_ALL):
    source = archive_source(archive, plan)
    return source, offline(source, plan.size, initial_objective(source, plan.seed))


def everything(archive):
    every = np.arange(archive.n_pairs)
    return archive.pairs(every), archive.origin(every).numbers


# -- the full datastore --------------------------------------------------------------------------


def test_in_all_directions_keys_are_as_far_from_each_other_as_in_the_archive(archive):
    pairs, _ = everything(archive)
    source = archive_source(archive, SelectionParams(n_dims=N_EMBD + 10))
    assert source.n_dims == N_EMBD
    picks = np.array([40, 3, 3, 200])
    assert np.allclose(
        distances_between(source.keys(picks)), distances_between(pairs.keys[picks]), atol=1e-3
    )
    assert np.array_equal(source.values, pairs.values)
    assert np.array_equal(source.p_lm, pairs.p_lm)


def distances_between(keys):
    keys = keys.astype(np.float64)
    return ((keys[:, None] - keys) ** 2).sum(axis=2)


def test_in_few_directions_keys_are_projected(archive):
    pairs, _ = everything(archive)
    source = archive_source(archive, SelectionParams(n_dims=5))
    assert source.n_dims == 5
    wanted = (pairs.keys.astype(np.float64) - source.basis.mean) @ source.basis.axes.T
    found = source.keys(np.arange(archive.n_pairs))
    assert np.allclose(found, wanted, atol=1e-4)
    assert (np.diff(found.var(axis=0)) <= 0).all()  # most of the differences first


def test_an_empty_archive_has_nothing_to_select_from(tmp_path):
    with Archive.open(tmp_path, BINDING, writable=True) as archive:
        for act in (
            lambda: build_datastore(archive, SelectionParams()),
            lambda: archive_source(archive, SelectionParams()),
        ):
            with pytest.raises(StoreError, match="is empty: nothing to select from"):
                act()


def test_nothing_selected_is_nothing_to_write(archive):
    source, _ = selected(archive)
    none = Selection(np.empty(0, np.int64), np.empty(0, np.float32))
    with pytest.raises(StoreError, match="nothing was selected"):
        fit_and_write(archive, source, none, initial_objective(source, 0), IN_ALL)


def test_theta_is_a_quarter_of_how_far_the_nearest_ten_are(archive):
    source = archive_source(archive, IN_ALL)
    distances = np.sort(distances_between(everything(archive)[0].keys), axis=1)
    wanted = 0.25 * np.median(distances[:, 1:11])  # each is its own nearest neighbor
    assert initial_objective(source, 0).theta == pytest.approx(wanted, rel=1e-3)


def test_theta_grows_with_the_squared_distances(archive):
    source = archive_source(archive, IN_ALL)
    near = initial_objective(source, 0)
    source.keys, keys = lambda picks: keys(picks) * 3, source.keys
    assert initial_objective(source, 0).theta == pytest.approx(9 * near.theta, rel=1e-3)
    source.keys = lambda picks: np.ones((len(picks), N_EMBD), np.float32)
    assert initial_objective(source, 0).theta == 1


# -- what is fitted on ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", [7, 8192], ids=["part by part", "in one"])
def test_held_out_are_the_nearest_of_other_conversations(archive, monkeypatch, part):
    for module in ("archive_source", "held_out"):
        monkeypatch.setattr(f"llmaas_plugins.knn_lm.build.{module}._PART", part)
    pairs, numbers = everything(archive)
    source, chosen = selected(archive)
    keys = pairs.keys[chosen.indices]
    held = held_out_targets(archive, source, chosen, keys, infos(archive), IN_ALL)
    picks = sorted(np.random.default_rng(0).choice(len(pairs), len(pairs), replace=False))
    assert len(held.p_lm) == len(picks)
    assert np.array_equal(held.p_lm, pairs.p_lm[picks])
    assert np.array_equal(held.p_max, pairs.p_max[picks])
    wide = pairs.keys.astype(np.float64)
    for i, pick in enumerate(picks):
        others = chosen.indices[numbers[chosen.indices] != numbers[pick]]
        distances = ((wide[others] - wide[pick]) ** 2).sum(axis=1)
        order = np.argsort(distances)[: IN_ALL.k]
        assert np.allclose(held.distances[i], distances[order], rtol=1e-5)
        assert np.array_equal(held.hits[i], pairs.values[others[order]] == pairs.values[pick])
        weights = dict(zip(chosen.indices.tolist(), chosen.weights, strict=True))
        assert held.weights[i].tolist() == [weights[j] for j in others[order].tolist()]


def test_where_other_conversations_have_few_pairs_there_are_few_neighbors(archive):
    _, numbers = everything(archive)
    first = np.flatnonzero(numbers == numbers[0])
    rest = np.flatnonzero(numbers != numbers[0])[:2]
    chosen = Selection(np.sort([*first, *rest]), np.ones(len(first) + 2, np.float32))
    source = archive_source(archive, IN_ALL)
    keys = source.keys(chosen.indices).astype(np.float16)
    held = held_out_targets(archive, source, chosen, keys, infos(archive), IN_ALL)
    n_finite = np.isfinite(held.distances).sum(axis=1)
    assert (n_finite[: len(first)] == 2).all()  # the first conversation's own targets
    assert set(n_finite[len(first) :].tolist()) == {6}


def test_what_is_fitted_on_is_what_the_app_may_hear(tmp_path):
    """An app may see its own pairs, and pairs that belong to no app."""
    apps = ["mail", "notes", "chat"] * 4
    fill(tmp_path, [record(seed, n_tokens=20, app=app) for seed, app in enumerate(apps)])
    with Archive.open(tmp_path, BINDING) as archive:
        shared = {
            n: dataclasses.replace(i, is_shared=i.app == "chat") for n, i in infos(archive).items()
        }
        source, chosen = selected(archive, SelectionParams(size=200, k=199, n_dims=N_EMBD))
        keys = archive.pairs(chosen.indices).keys
        whole = dataclasses.replace(IN_ALL, k=199)
        held = held_out_targets(archive, source, chosen, keys, shared, whole)
        numbers = archive.origin(chosen.indices).numbers
        for pick, distances in enumerate(held.distances):
            own = archive.origin(np.array([pick])).numbers[0]
            may = [apps[n] in {"chat", apps[own]} and n != own for n in numbers.tolist()]
            assert np.isfinite(distances).sum() == sum(may)


# -- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_dims", [5, N_EMBD])
def test_what_is_written_is_what_was_selected(archive, n_dims):
    plan = SelectionParams(size=90, k=6, n_dims=n_dims)
    pairs, numbers = everything(archive)
    source, chosen = selected(archive, plan)
    report = fit_and_write(archive, source, chosen, initial_objective(source, 0), plan)
    assert (report.n_pairs, report.n_full) == (90, len(pairs))
    order = np.argsort(chosen.indices)
    indices, weights = chosen.indices[order], chosen.weights[order]
    datastore = Datastore.open(archive.directory / SELECTED, BINDING.fingerprint)
    assert np.array_equal(datastore.values, pairs.values[indices])
    assert np.array_equal(datastore.weights, weights)
    ids = {info.number: info.id for info in archive.conversations()}
    found = [datastore.conversations[place] for place in datastore.origins[:, 0]]
    assert found == [ids[number] for number in numbers[indices].tolist()]
    for row in (0, 44, 89):
        nearest = datastore.search(pairs.keys[indices[row]].astype(np.float32), 1)
        assert (nearest.rows[0], nearest.distances[0]) == (row, 0)
    datastore.close()


def test_selecting_again_with_the_same_seed_is_the_same(archive):
    texts = []
    for seed in (1, 1, 2):
        build_datastore(archive, SelectionParams(size=90, k=6, n_dims=5, seed=seed))
        texts.append((archive.directory / SELECTED).read_bytes())
    assert texts[0] == texts[1] != texts[2]


def test_a_selection_that_is_ended_leaves_the_file_that_was_there(archive):
    def told(_n):
        raise KeyboardInterrupt

    build_datastore(archive, IN_ALL)
    before = (archive.directory / SELECTED).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        build_datastore(archive, SelectionParams(size=50, k=6), told)
    assert (archive.directory / SELECTED).read_bytes() == before


# -- windows of long conversations ---------------------------------------------------------------


@settings(max_examples=scale(100, 5000), deadline=None)
@given(st.integers(0, 3000), st.integers(2, 700))
def test_windows_give_every_target_once_after_half_a_window(n_tokens, n_ctx):
    seen = []
    for start, first_row, end in _windows(n_tokens, n_ctx):
        assert 0 <= start <= first_row < end <= n_tokens
        assert end - start <= n_ctx
        assert start == 0 or first_row - start + 1 >= n_ctx // 2
        seen += range(first_row + 1, end)  # targets
    assert seen == list(range(1, n_tokens))


# -- refreshes -----------------------------------------------------------------------------------


@pytest.fixture
def in_small_parts(monkeypatch):
    monkeypatch.setattr(held_out, "_PART", 32)
    monkeypatch.setattr(held_out, "_SOME", 32)
    monkeypatch.setattr(writer, "_ROWS", 32)


@pytest.mark.usefixtures("in_small_parts")
def test_a_refresh_may_pause_between_all_its_parts(archive):
    """While it is fitted and written, too, which takes most of its time."""
    pauses = []
    done = update_datastore(archive, IN_ALL, pauses.append)
    assert sum(pauses) == archive.n_pairs
    n_selected, n_queries = (-(-n // 32) for n in (done.n_pairs, archive.n_pairs))
    assert pauses.count(0) >= 3 * n_selected + n_queries


@pytest.mark.usefixtures("in_small_parts")
def test_a_refresh_that_is_ended_in_a_pause_changes_nothing(archive):
    update_datastore(archive, IN_ALL)
    archive.append(record(99, n_tokens=20))
    files = [archive.directory / name for name in (SELECTED, ONLINE)]
    before, n_ended = [path.read_bytes() for path in files], 0
    while True:
        left = iter(range(n_ended))

        def end(_, left=left):
            if next(left, None) is None:
                raise InterruptedError

        with contextlib.suppress(InterruptedError):
            update_datastore(archive, IN_ALL, end)
            break
        assert [path.read_bytes() for path in files] == before
        n_ended += 1
    assert n_ended > 10
    assert [path.read_bytes() for path in files] != before


def test_a_refresh_by_another_rule_starts_over(archive):
    drawn = SelectionParams(size=60, k=6, n_dims=N_EMBD)
    hardest = SelectionParams(size=60, k=6, n_dims=N_EMBD, how="top")
    seen = [[], [], []]
    for params, counts in zip((drawn, drawn, hardest), seen, strict=True):
        update_datastore(archive, params, counts.append)
    assert [sum(counts) for counts in seen] == [archive.n_pairs, 0, archive.n_pairs]
