"""Thousands of calls over contexts that come and go: the process's resources do not grow."""

from __future__ import annotations

import contextlib
import threading
import tracemalloc
from pathlib import Path

import pytest
from soak import scale

from llmaas_plugins import activate
from llmaas_plugins.service import LLMService, ServiceConfig

CALLS = scale(90, 5000)
N_CONTEXTS = 4
MOST_TURNS = 5  # then the context is deleted and begun anew
MIB = 1 << 20
SETTINGS = {
    "lossless, shared": {"codec": "lossless", "ram_budget": "1 MiB", "share_across_apps": True},
    "tolerance, parked": {"codec": "tolerance", "ram_budget": "2 MiB", "parked_tokens": 256},
}


def rss():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def n_files():
    """Return open files and I/O rings; a thread has a ring from its first read to its end."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    names = [str(path.readlink()) for path in links]
    n_rings = sum("io_uring" in name for name in names)
    return len(names) - n_rings, n_rings


@pytest.mark.soak
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_thousands_of_calls_leave_nothing_behind(make_llama, tmp_path, settings):
    table = {"disk_budget": "3 MiB", "store": f"{tmp_path}/kv"} | settings
    config = {"on_error": "raise", "plugins": {"kv_chunks": table}}
    state = ServiceConfig(state_dir=tmp_path / "state")
    with (
        activate(config) as suite,
        contextlib.closing(make_llama(n_ctx=512, n_threads_batch=1, flash_attn=True)) as engine,
        LLMService(engine, state) as service,
    ):
        apps = [service.bind(f"app {i}") for i in range(N_CONTEXTS)]

        def call(i):
            app = apps[i % N_CONTEXTS]
            context = (app.contexts() or [app.new_context(f"{app.name} is here.")])[0]
            if context.record().n_calls == MOST_TURNS:
                context.delete()
                context = app.new_context(f"{app.name} is here again.")
            context.call(f"I say {i}.", temperature=0.0, max_tokens=4)

        for i in range(CALLS // 3):
            call(i)
        warm, (files, _) = rss(), n_files()
        for i in range(CALLS // 3, CALLS):
            call(i)
        grown = rss() - warm
        kv = suite.status()["plugins"]["kv_chunks"]
        assert grown < 8 * MIB
        files_now, n_rings = n_files()
        assert files_now <= files
        assert n_rings <= threading.active_count()
        held = kv["ram_bytes"] + kv["buffer_bytes"] + kv["lent_bytes"]
        assert held <= kv["ram_budget_bytes"] <= 2 * MIB
        assert kv["disk_bytes"] <= kv["disk_budget_bytes"]
        assert kv["requests"] == CALLS
        assert kv["restores"] + kv.get("takes", 0) > CALLS / 2  # nearly each call was a switch
        assert kv["faults"] == kv["io_errors"] == 0


def test_contexts_that_come_and_go_leave_no_objects(tmp_path):
    config = ServiceConfig(state_dir=tmp_path, max_contexts_per_app=1)

    def live(n_calls):
        for i in range(n_calls):
            app = service.bind(f"app {i}")
            app.new_context("Somebody is here.").delete()

    with LLMService(lambda: None, config) as service:
        live(50)
        tracemalloc.start()
        live(50)
        before = tracemalloc.get_traced_memory()[0]
        live(scale(500, 20_000))
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert grown < 20_000
