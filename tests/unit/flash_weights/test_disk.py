"""The cost of reads: two numbers fitted to measurements on a noisy disk."""

from __future__ import annotations

import json

import pytest

from llmaas_hooks import StoreError
from llmaas_plugins.flash_weights import disk
from llmaas_plugins.flash_weights.disk import (
    DEPTHS,
    MOST_BYTES,
    SIZES,
    Disk,
    Rate,
    fit_disk,
    measure_disk,
)

READ_S, RATE = 10e-6, 1.5e9


def rate_of(n_bytes, read_s=READ_S, rate=RATE):
    return n_bytes / (read_s + n_bytes / rate)


def measured(*, best_depth=16, rounds=(1, 1, 1, 1, 1)):
    """Return rates of a disk that is slower at other depths; some rounds may be disturbed."""
    return [
        Rate(n_bytes, depth, rate_of(n_bytes) * (1 if depth == best_depth else 0.5) * disturbed)
        for disturbed in rounds
        for n_bytes in SIZES
        for depth in DEPTHS
    ]


def test_the_two_numbers_are_found():
    found = fit_disk(measured())
    assert found.read_s == pytest.approx(READ_S)
    assert found.bytes_per_s == pytest.approx(RATE)
    assert found.gap_bytes == pytest.approx(READ_S * RATE, abs=2)
    assert (found.small_depth, found.large_depth) == (16, 16)
    assert found.seconds(4096, 100) == pytest.approx(100 * (READ_S + 4096 / RATE))
    assert len(found.rates) == len(SIZES) * len(DEPTHS)


def test_disturbed_rounds_do_not_matter():
    assert fit_disk(measured(rounds=(1, 0.1, 1, 2, 1))) == fit_disk(measured())


@pytest.mark.parametrize(("slower", "expected"), [(0.98, 1), (0.5, 16)])
def test_more_at_a_time_has_to_be_faster(slower, expected):
    taken = [
        Rate(n_bytes, depth, rate_of(n_bytes) * (slower if depth < 16 else 1))
        for n_bytes in SIZES
        for depth in DEPTHS
    ]
    found = fit_disk(taken)
    assert (found.small_depth, found.large_depth) == (expected, expected)


def test_short_and_long_reads_have_depths_of_their_own():
    taken = [
        Rate(n_bytes, depth, rate_of(n_bytes) * (1 if depth == best else 0.5))
        for n_bytes, best in zip(SIZES, [64, 16, 16, 4, 4], strict=True)
        for depth in DEPTHS
    ]
    found = fit_disk(taken)
    assert (found.small_depth, found.large_depth) == (64, 4)


def test_reads_that_cost_nothing_beside_their_bytes():
    found = fit_disk([Rate(n, 1, 1e9 / (1 + n / 1e7)) for n in SIZES])  # long reads are slower
    assert found.read_s == 0
    assert 0.85e9 < found.bytes_per_s < 1e9


def test_bytes_that_cost_nothing():
    found = fit_disk([Rate(n, 1, n / (1e-3 - n * 1e-11)) for n in SIZES])
    assert found.seconds(4096, 1) == pytest.approx(1e-3, rel=0.3)
    assert found.bytes_per_s > 0
    assert found.read_s >= 0


def test_sizes_that_are_as_fast_as_any():
    fastest = {4 << 10: 0.2e9, 16 << 10: 0.6e9, 64 << 10: 1.4e9, 256 << 10: 1.5e9, 1 << 20: 1.46e9}
    found = fit_disk([Rate(n, depth, rate) for n, rate in fastest.items() for depth in (1, 4)])
    assert found.fast_sizes == [256 << 10, 1 << 20]


def test_one_size_tells_nothing():
    with pytest.raises(ValueError, match="one size"):
        fit_disk([Rate(4096, 1, 1e9)])


def test_as_text_and_back():
    found = fit_disk(measured())
    assert Disk.from_json(found.to_json()) == found


@pytest.mark.parametrize("text", ["[]", "{}", '{"rates": [1]}', '{"rates": [], "read": 1}', "x"])
def test_other_texts(text):
    with pytest.raises(ValueError):
        Disk.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"read_s": -1.0}, {"read_s": "x"}, {"read_s": 1e30}, {"bytes_per_s": 0.0},
        {"bytes_per_s": True}, {"small_depth": 0}, {"large_depth": 1 << 60},
        {"large_depth": 2.0}, {"rates": []}, {"rates": [[4096, 1, -5.0]]},
        {"rates": [[0, 1, 5.0]]}, {"rates": [["a", "b", "c"]]},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_no_disk_has(change):
    fields = json.loads(fit_disk(measured()).to_json())
    Disk.from_json(json.dumps(fields))
    with pytest.raises(ValueError, match="no measurement of a disk"):
        Disk.from_json(json.dumps(fields | change))


def test_deep_nesting_is_no_measurement():
    with pytest.raises(ValueError, match="nested too deeply"):
        Disk.from_json("[" * 100_000)


def test_a_file_is_read_in_turns(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(300 << 10))  # too short for the longest reads
    asked, passed = [], []

    def rate(path, n_bytes, depth, seconds):
        assert path == tmp_path / "file"
        asked.append((n_bytes, depth))
        assert seconds > 0
        return rate_of(n_bytes)

    monkeypatch.setattr(disk, "read_rate", rate)
    found = measure_disk(tmp_path / "file", 10, passed.append)
    turn = [
        (n_bytes, depth)
        for n_bytes in SIZES[:-1]
        for depth in DEPTHS
        if n_bytes * depth <= MOST_BYTES
    ]
    assert (4096, 256) in turn
    assert asked == turn * (len(asked) // len(turn))
    assert len(asked) > len(turn)
    assert len(passed) == len(asked)
    assert found.read_s == pytest.approx(READ_S)


def test_time_that_is_up_ends_it_after_a_turn(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(2 << 20))
    clock = iter(range(1000))
    monkeypatch.setattr(disk.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(disk, "read_rate", lambda _path, n_bytes, *_: rate_of(n_bytes))
    found = measure_disk(tmp_path / "file", 3)
    assert next(clock) == len(found.rates) + 1
    assert {rate.n_bytes for rate in found.rates} == set(SIZES)
    assert {rate.depth for rate in found.rates} == set(DEPTHS)


def test_a_real_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    found = measure_disk(path, 0.1)
    assert found.bytes_per_s > 0
    assert found.read_s >= 0
    assert {rate.n_bytes for rate in found.rates} == set(SIZES)
    assert path.read_bytes() == bytes(4 << 20)


@pytest.mark.parametrize("content", [None, bytes(5000)], ids=["none", "short"])
def test_files_that_tell_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(StoreError):
        measure_disk(tmp_path / "file", 0.1)
