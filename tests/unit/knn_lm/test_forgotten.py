"""The list of forgotten conversations: it recognizes them and reveals nothing."""

from __future__ import annotations

import hashlib

import pytest
from damages import FOREIGN, LINKS, ODD, content, each_told

from llmaas_hooks import StoreError
from llmaas_plugins.knn_lm.archive.suppression import SuppressionList

IDS = [bytes([i]) * 16 for i in range(4)]


def known(folder):
    forgotten = SuppressionList(folder)
    return [id_ in forgotten for id_ in IDS]


def test_what_was_forgotten_is_known_until_it_is_wanted_again(tmp_path):
    assert known(tmp_path) == [False] * 4
    SuppressionList(tmp_path).add(IDS[:2])
    SuppressionList(tmp_path).add([IDS[3], IDS[0]])
    assert known(tmp_path) == [True, True, False, True]
    for id_ in (IDS[1], IDS[2]):
        SuppressionList(tmp_path).discard(id_)
    assert known(tmp_path) == [True, False, False, True]
    for id_ in IDS:
        SuppressionList(tmp_path).discard(id_)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_noted_of_nothing(tmp_path):
    SuppressionList(tmp_path).add([])
    SuppressionList(tmp_path).discard(IDS[0])
    assert list(tmp_path.iterdir()) == []


def test_the_list_tells_nothing_without_its_key(tmp_path):
    """It holds neither ids nor plain digests, and two stores' lists have nothing in common."""
    stores = [tmp_path / name for name in ("one", "two")]
    for store in stores:
        store.mkdir()
        SuppressionList(store).add(IDS)
    one, two = ((store / "forgotten").read_bytes() for store in stores)
    assert len(one) == len(two) == 8 + 32 + 4 * 16
    digests = [hashlib.blake2b(id_, digest_size=16).digest() for id_ in IDS]
    assert not any(trace in one for trace in IDS + digests)
    assert not {one[i : i + 16] for i in range(8, len(one), 16)} & {
        two[i : i + 16] for i in range(8, len(two), 16)
    }
    assert (stores[0] / "forgotten").stat().st_mode & 0o777 == 0o600


CUT = {f"{n} bytes": content((b"LLKNFGT1" + bytes(99))[:n]) for n in (8, 39, 55)}


@each_told(
    {
        r"forgotten conversations, is damaged\. Remove it": {**FOREIGN, **CUT},
        "is a symbolic link": LINKS,
        "is not a regular file": ODD,
    }
)
def test_a_damaged_list_is_told(tmp_path, damage, message):
    damage(tmp_path / "forgotten")
    with pytest.raises(StoreError, match=message):
        SuppressionList(tmp_path)
