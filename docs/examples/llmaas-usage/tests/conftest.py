"""The plugin under test on the packaged model, without installing either plugin or app."""

import contextlib

import pytest
from llama_cpp import Llama
from llmaas_hooks import HookManager
from llmaas_patches import install
from llmaas_plugins.reference_model import reference_model_path

from llmaas_usage import Usage, UsageConfig


@pytest.fixture
def running(tmp_path):
    """Run a ``Llama`` with the plugin on, and with ``others``; its status can be asked for."""

    @contextlib.contextmanager
    def start(others=(), **settings):
        hooks = HookManager(on_error="raise")  # a failing hook fails the test
        hooks.register("usage", Usage(UsageConfig(state_dir=tmp_path, **settings)))
        for name, plugin in others:
            hooks.register(name, plugin)
        installed = install(hooks)

        def status():
            installed.settle()  # what was deferred is done
            return hooks.status()["usage"]

        try:
            model = str(reference_model_path())
            with contextlib.closing(
                Llama(model, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
            ) as llama:
                yield llama, status
            assert hooks.errors() == {}
        finally:
            installed.revert()
            hooks.shutdown()

    return start
