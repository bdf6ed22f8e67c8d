"""Calibration: thresholds and channel order, against those of the activations themselves."""

from __future__ import annotations

import contextlib

import llama_cpp
import numpy as np
import pytest
from claiming import created, decode, loaded, native
from families import write_family
from watching import Watch, values_of

from llmaas_hooks import ConfigError, LlmaasError
from llmaas_patches.native.packing import model_tensors
from llmaas_plugins.flash_weights import calibration
from llmaas_plugins.flash_weights.calibration import Calibrator, channel_order
from llmaas_plugins.flash_weights.operands import FAMILIES, operands
from llmaas_plugins.flash_weights.shares import SPARSITIES, equal_share
from llmaas_plugins.model import forward as evaluating

BUCKET = 1 / 64
"""Maximum width of a magnitude bucket."""
TEXT = np.random.default_rng(3).integers(300, 4000, 600).astype(np.int32)


@contextlib.contextmanager
def calibrating(path):
    """Calibrate the model at ``path`` on one thread."""
    calibrator = Calibrator()
    with native(calibrator=calibrator), loaded(path) as model:

        def calibrate(*text, found=None, **settings):
            found = operands(model_tensors(path)) if found is None else found
            return calibrator.calibrate(model, found, *text, n_threads=1, **settings)

        yield calibrate


def activations(path, text):
    """Return vanilla's activations of each operand, in windows of 511 tokens and a BOS."""
    found = operands(model_tensors(path))
    readers = {operand.weights[0].encode(): operand for operand in found}
    rows = {operand: [] for operand in found}

    def keep(node):
        operand = readers[node.src[0].contents.name]
        rows[operand].append(values_of(node.src[1].contents).reshape(-1, operand.n_channels))

    watch = Watch(lambda node: bool(node.src[0]) and node.src[0].contents.name in readers, keep)
    settings = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512} | watch.settings
    with loaded(path) as model, created(model, **settings) as ctx:
        for taken in rows.values():
            taken.clear()
        bos = llama_cpp.llama_vocab_bos(llama_cpp.llama_model_get_vocab(model))
        for start in range(0, len(text), 511):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
            assert decode(ctx, [bos, *text[start : start + 511].tolist()], 0) == 0
    return {operand: np.abs(np.concatenate(taken)) for operand, taken in rows.items()}


def test_of_a_text(reference_model):
    expected, done = activations(reference_model, TEXT), []
    with calibrating(reference_model) as calibrate:
        found = calibrate(TEXT, progress=done.append)
    assert sum(done) == len(TEXT) + 2
    assert {operand.family for operand in found} == set(FAMILIES)
    assert found.keys() == expected.keys()
    for operand, sizes in expected.items():
        assert sizes.shape == (len(TEXT) + 2, operand.n_channels)
        activity = found[operand]
        assert activity.thresholds.dtype == activity.means.dtype == np.float32
        np.testing.assert_allclose(activity.thresholds, np.quantile(sizes, SPARSITIES), rtol=BUCKET)
        # a row's last bits depend on the rest of its batch
        np.testing.assert_allclose(activity.means, sizes.mean(axis=0), rtol=1e-2)


@pytest.mark.parametrize("group_layers", [1, 2])
def test_which_channels_the_group_before_foresees(reference_model, group_layers):
    sizes = activations(reference_model, TEXT)
    found = operands(model_tensors(reference_model))
    calibrator = Calibrator()
    with native(calibrator=calibrator), loaded(reference_model) as model:
        known = calibrator.calibrate(model, found, TEXT, n_threads=1)
        measured = calibrator.foresee(model, known, group_layers, TEXT, n_tokens=600, n_threads=1)
    large = {one: sizes[one][..., None] >= activity.thresholds for one, activity in known.items()}
    for operand, activity in measured.items():
        first = (operand.layer // group_layers - 1) * group_layers
        before = [one for one in found if (one.layer, one.family) == (first, operand.family)]
        expected = np.zeros(19)
        if before:
            both = large[operand] & large[before[0]]
            expected = both.sum(axis=(0, 1)) / large[operand].sum(axis=(0, 1))
            assert activity.foreseen[9] > 0.4
        np.testing.assert_allclose(activity.foreseen, expected, atol=0.01)
        assert activity.foreseen.dtype == np.float32
        assert np.array_equal(activity.thresholds, known[operand].thresholds)


@pytest.mark.slow
def test_of_what_the_model_says(reference_model):
    done = []
    with calibrating(reference_model) as calibrate:
        found = calibrate(n_tokens=301, progress=done.append)
        again = calibrate(n_tokens=301)
        more = calibrate(n_tokens=601)
    assert sum(done) == 301
    for operand, activity in found.items():
        assert (np.diff(activity.thresholds) > 0).all()
        assert np.array_equal(activity.means, again[operand].means)
        assert np.array_equal(activity.thresholds, again[operand].thresholds)
        assert not np.array_equal(activity.means, more[operand].means)


def test_of_a_mixture_of_experts(tmp_path):
    path = write_family("llama-moe", tmp_path / "moe.gguf")
    with calibrating(path) as calibrate:
        found = calibrate(n_tokens=8)
    assert {operand.family for operand in found} == {"attn_qkv", "attn_output"}


def test_what_has_ended_starts_again(reference_model, monkeypatch):
    """If every token ends a text, each text is its first token, so nothing else is evaluated."""
    monkeypatch.setattr(evaluating.llama_cpp, "llama_vocab_is_eog", lambda _vocab, _token: True)
    with calibrating(reference_model) as calibrate:
        once, often = calibrate(n_tokens=4), calibrate(n_tokens=12)
    for operand, activity in once.items():
        np.testing.assert_allclose(often[operand].means, activity.means, rtol=1e-5)


def test_what_has_no_room_left_starts_again(reference_model, monkeypatch):
    decode_, seen = evaluating.Evaluator._decode, []

    def watched(self, tokens, positions, sequences):
        seen.append(list(positions))
        return decode_(self, tokens, positions, sequences)

    monkeypatch.setattr(evaluating, "_LENGTH", 32)
    monkeypatch.setattr(evaluating.Evaluator, "_decode", watched)
    with calibrating(reference_model) as calibrate:
        calibrate(n_tokens=4 * 40)
    assert len(seen) == 40
    assert max(map(max, seen)) == 31
    assert sum(one[0] == 0 for one in seen) >= 2


def test_tokens_are_drawn_as_often_as_they_are_likely():
    likely = np.array([0.5, 0.0, 0.3, 0.2])
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(likely) + 7, (20_000, 1)).astype(np.float32)
    drawn = evaluating._sampled(logits, np.random.default_rng(1))
    found = np.bincount(drawn, minlength=4) / len(drawn)
    assert found[1] == 0
    assert np.abs(found - likely).max() < 0.02


@pytest.mark.parametrize(
    ("n_text", "n_tokens", "starts"),
    [(1000, 2000, range(0, 1000, 100)), (1000, 300, (0, 300, 600)), (50, 300, (0,))],
)
def test_windows_are_from_all_over_a_text(n_text, n_tokens, starts):
    text = np.arange(n_text, dtype=np.int32)
    windows = list(evaluating._windows(text, n_tokens, 100))
    assert [int(window[0]) for window in windows] == list(starts)
    assert all(len(window) == min(n_text, 100) for window in windows)


def test_quantiles_of_zeros_and_of_one_bucket():
    counts = np.zeros(16320, np.uint64)
    counts[0], counts[127 << 6] = 60, 40  # the second one starts at 1.0
    quantiles = calibration._quantiles(counts, equal_share())
    assert (quantiles[:11] < 1e-38).all()
    assert (quantiles[12:] > 1).all()
    assert (quantiles[12:] < 1 + BUCKET).all()


def test_channels_are_ordered_by_their_mean():
    thresholds = np.ones(19, np.float32)
    small = calibration.Activity(thresholds, np.array([3, 1, 0, 2], np.float32))
    large = calibration.Activity(thresholds, np.array([100, 500, 0, 100], np.float32))
    assert channel_order([small]).tolist() == [0, 3, 1, 2]
    assert channel_order([small, large]).tolist() == [1, 0, 3, 2]
    assert channel_order([small]).dtype == np.int32


def test_errors(reference_model):
    with calibrating(reference_model) as calibrate:
        with pytest.raises(ConfigError, match="no text to calibrate with"):
            calibrate(TEXT[:0])
        with pytest.raises(ConfigError, match="no matrices"):
            calibrate(found=[])


def test_a_model_that_passes_no_hook_point(reference_model):
    found = operands(model_tensors(reference_model))
    with loaded(reference_model) as model, pytest.raises(LlmaasError, match="no hook point"):
        Calibrator().calibrate(model, found, n_tokens=8)


def test_activations_that_are_not_finite(reference_model):
    found = operands(model_tensors(reference_model))
    magnitudes = _Magnitudes(np.full(found[0].n_channels, np.nan))
    with pytest.raises(LlmaasError, match=r"some inputs of blk\.0\.attn_q\.weight are not"):
        calibration._activity(found[0], magnitudes, equal_share())


class _Magnitudes:
    """Magnitudes of one row, with these sums."""

    def __init__(self, sums):
        self._sums = sums

    def read(self, _layer):
        counts = np.zeros(16320, np.uint64)
        counts[5] = len(self._sums)
        return counts, self._sums
