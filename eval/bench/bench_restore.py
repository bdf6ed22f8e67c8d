"""Bringing a 2,048-token context of a 1 B-shape model back: 68 MB of f16 KV.

Ours against ``llama_state_seq_load_file``, in pairs: from RAM, from disk with warm and cold page
cache, and with the disk capped at the speed of slower ones; from RAM, ``LlamaRAMCache`` too.
"""

from __future__ import annotations

import pytest

from llmaas_eval.disk import can_limit_reads, read_limit
from llmaas_eval.paired import compare


@pytest.mark.parametrize("vanilla", ["vanilla_restore", "cache_restore"])
def bench_restore_from_ram(stored, benchmark, vanilla):
    """Both from memory: the RAM tier, and the page cache or a state as ``bytes``."""
    stored.cache_save()
    compare(benchmark, stored.restore, getattr(stored, vanilla), before=stored.empty)
    benchmark.extra_info["stored_share"] = stored.stored_bytes / stored.n_bytes


def bench_restore_from_disk_warm(stored, benchmark):
    """Ours reads past the page cache; vanilla's file is in it."""

    def before():
        stored.empty()
        stored.leave_ram()

    compare(benchmark, stored.restore, stored.vanilla_restore, before=before)


def bench_restore_from_disk_cold(stored, benchmark):
    """Both files are out of the page cache."""
    compare(benchmark, stored.restore, stored.vanilla_restore, before=cold(stored))


@pytest.mark.parametrize("mb_per_s", [1000, 300, 100])
def bench_restore_from_slower_disk(stored, benchmark, mb_per_s):
    """Cold, with reads capped by the block layer (cgroup v1 blkio)."""
    if not can_limit_reads():
        pytest.skip("needs a writable cgroup v1 blkio controller")
    rounds = 10 if mb_per_s >= 300 else 4
    with read_limit(stored.state_file.parent, mb_per_s * 1_000_000):
        compare(
            benchmark, stored.restore, stored.vanilla_restore, before=cold(stored), rounds=rounds
        )


def cold(stored):
    def before():
        stored.empty()
        stored.leave_ram()
        stored.drop_pages()

    return before
