"""Time to restore a 2,048-token context of a 1 B-shape model: 68 MB of F16 KV.

Ours is compared in pairs with ``llama_state_seq_load_file``: from RAM, from disk with a warm and a
cold page cache, and with the disk limited to slower speeds. From RAM, ours is also compared with
``LlamaRAMCache``.
"""

from __future__ import annotations

import pytest

from llmaas_eval.disk import can_limit_reads, read_limit
from llmaas_eval.paired import compare


@pytest.mark.parametrize("vanilla", ["vanilla_restore", "cache_restore"])
def bench_restore_from_ram(stored, benchmark, vanilla):
    """Compare restores from memory: ours from the RAM tier, vanilla from page cache or a state."""
    stored.cache_save()
    compare(benchmark, stored.restore, getattr(stored, vanilla), before=stored.empty)
    benchmark.extra_info["stored_share"] = stored.stored_bytes / stored.n_bytes


def bench_restore_from_disk_warm(stored, benchmark):
    """Compare restores from disk: ours bypasses the page cache, vanilla's file is in it."""

    def before():
        stored.empty()
        stored.leave_ram()

    compare(benchmark, stored.restore, stored.vanilla_restore, before=before)


def bench_restore_from_disk_cold(stored, benchmark):
    """Compare restores from disk with neither file in the page cache."""
    compare(benchmark, stored.restore, stored.vanilla_restore, before=cold(stored))


@pytest.mark.parametrize("mb_per_s", [1000, 300, 100])
def bench_restore_from_slower_disk(stored, benchmark, mb_per_s):
    """Compare cold restores with reads limited by the block layer (cgroup v1 blkio)."""
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
