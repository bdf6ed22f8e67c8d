"""The plugin under test on the packaged model, without installing either plugin or app."""

import contextlib

import pytest
from llama_cpp import Llama
from llmaas_hooks import testing
from llmaas_patches import install
from llmaas_plugins.reference_model import reference_model_path

from llmaas_usage import Usage, UsageConfig


def engine():
    """Return a small ``Llama``."""
    model = str(reference_model_path())
    return Llama(model, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)


@pytest.fixture
def running(tmp_path):
    """Run a ``Llama`` with the plugin on, and with ``others``; its status can be asked for."""

    @contextlib.contextmanager
    def start(others=(), **settings):
        usage = Usage(UsageConfig(state_dir=tmp_path, **settings))
        with (
            testing.running({"usage": usage, **dict(others)}, install) as plugins,
            contextlib.closing(engine()) as llama,
        ):
            yield llama, lambda: plugins.status("usage")

    return start


@pytest.fixture
def use():
    """Return an app that opens a ``Llama`` and asks it something."""

    def use(_hooks):
        with contextlib.closing(engine()) as llama:
            llama("Once upon a time", max_tokens=4)

    return use
