"""Nothing is kept under the address of a context or model that was freed."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
from datastores import ENGINE, built
from llama_cpp import Llama, llama_cpp

from llmaas_hooks import hookimpl
from llmaas_plugins import activate

N_MODELS, N_CONTEXTS = 8, 25


class Addresses:
    """Plugin that records the addresses of all contexts and models."""

    def __init__(self):
        self.seen, self.loads = frozenset(), weakref.WeakSet()

    @hookimpl
    def llmaas_context_create(self, create):
        self.loads.add(create.load)
        self.seen |= {create.model}
        create.checks.append(self._made)

    def _made(self, ctx):
        self.seen |= {ctx}  # a new set each time, which is no table of the suite's
        return True


def tables(suite, names):
    """Yield the dicts and sets of a suite and its plugins, with names."""
    roots = [suite, *map(suite.plugin, names)]
    waiting, known = [(type(root).__name__, root) for root in roots], set()
    while waiting:
        name, one = waiting.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        if isinstance(one, weakref.WeakValueDictionary | weakref.WeakKeyDictionary):
            one = dict(one)
        if isinstance(one, dict | set | weakref.WeakSet):
            yield name, one
        if isinstance(one, dict):
            waiting += [(f"{name}[…]", inner) for inner in [*one, *one.values()]]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += [(f"{name}[…]", inner) for inner in one]
        elif type(one).__module__.startswith("llmaas_"):
            slots = [slot for each in type(one).__mro__ for slot in getattr(each, "__slots__", ())]
            inner = {slot: getattr(one, slot) for slot in slots if hasattr(one, slot)}
            inner |= getattr(one, "__dict__", {})
            waiting += [(f"{name}.{key}", value) for key, value in inner.items()]


@pytest.fixture
def plugins(tmp_path, reference_model):
    """Return settings with which every plugin is in use."""
    return {
        "kv_chunks": {"store": str(tmp_path / "kv"), "parked_tokens": 256},
        "knn_lm": {"store": str(built(reference_model, tmp_path / "knn")), "drafts": True},
        "elastic": {},
        "flash_weights": {"memory_budget": "100%"},
    }


def live(model):
    """Load a model, answer with it, make and free more contexts of it, and free everything."""
    with contextlib.closing(Llama(str(model), **ENGINE)) as llama:
        llama.create_completion("The quick brown fox jumps over", max_tokens=2)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_threads = 512, 8, 1
        for i in range(N_CONTEXTS):
            params.n_seq_max = 1 + i % 2  # two sequences: plugins leave such a context alone
            ctx = llama_cpp.llama_init_from_model(llama.model, params)
            assert ctx
            llama_cpp.llama_free(ctx)


@pytest.mark.slow
def test_tables_by_address_forget_what_was_freed(plugins, reference_model):
    addresses = Addresses()
    with activate({"on_error": "raise", "plugins": plugins}, {"addresses": addresses}) as suite:
        for _ in range(N_MODELS):
            live(reference_model)
        gc.collect()
        suite.settle()
        kept = {name: addresses.seen.intersection(found) for name, found in tables(suite, plugins)}
        assert {name: found for name, found in kept.items() if found} == {}
        assert not addresses.loads
