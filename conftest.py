"""Fixtures of all tests, and guards: no network, no suite left active, none of your settings."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort must not start a debugger
for _name in [name for name in os.environ if name.startswith("LLMAAS_PLUGINS")]:
    del os.environ[_name]  # your settings must not affect the tests
os.environ["LLMAAS_CONFIG"] = ""  # your configuration file must not either
os.environ["LANGUAGE"] = "C"  # nor your language, for which each parser would look for files

ROOT = Path(__file__).parent
DIST = ROOT / "tests" / "data" / "dist"
_LOOPBACK = ("127.", "::1", "localhost")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's own options."""
    parser.addoption(
        "--write-compat", action="store_true", help="rewrite docs/reference/compatibility.md"
    )
    parser.addoption("--soak-log", metavar="FILE", help="continue from this log of soak tests")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins that collect the compatibility tables and log soak tests."""
    from compat import CompatTables
    from hypothesis import settings
    from soak_log import SoakLog

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")  # a busy machine is no failure
    config.pluginmanager.register(CompatTables(), "compat-tables")
    if path := config.getoption("--soak-log"):
        is_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(SoakLog(path, writes=not is_worker), "soak-log")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage meanwhile, and exempt what the collection made from garbage collections.

    Thousands of tests and the clients' modules are 400 000 objects. flash_weights and many tests
    collect garbage themselves, and each time Python would visit all these objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Let Ctrl-C interrupt the tests.

    A shell starts background jobs with Ctrl-C ignored, and child processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _offline() -> Iterator[None]:
    """Block all connections that leave this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        yield


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: socket.socket, *args: Any) -> Any:
        is_local = self.family == socket.AF_UNIX or str(args[-1][0]).startswith(_LOOPBACK)
        if not is_local:
            pytest.fail(f"a test tried to reach {args[-1]}; tests run without network")
        return original(self, *args)

    return call


@pytest.fixture(scope="session", autouse=True)
def _own_digests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the digests of the tests' models out of your cache, also those of child processes."""
    fonts = os.environ.get("MPLCONFIGDIR", str(Path("~/.cache/matplotlib").expanduser()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MPLCONFIGDIR", fonts)  # matplotlib needs seconds to rebuild its font cache
        yield


@pytest.fixture(scope="session", autouse=True)
def _quicker() -> Iterator[None]:
    """Let what thousands of tests do again take less time (``tests/support/quicker.py``)."""
    if "llama_cpp" not in sys.modules:
        yield
        return
    from quicker import changes

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, replacement in changes():
            patch.setattr(owner, name, replacement, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _families(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give the folder for models that are copied."""
    if "families" in sys.modules:
        sys.modules["families"].folder = tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    """Put the suite's logger back, which commands with ``-v`` change for their whole process."""
    logger = logging.getLogger("llmaas")
    handlers, propagates, level = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = handlers, propagates
    if logger.level != level:
        logger.setLevel(level)  # also drops what loggers have cached about the level


@pytest.fixture(autouse=True)
def _no_suite_left() -> Iterator[None]:
    """Fail a test that leaves a suite active, and deactivate the suite for the next test."""
    yield
    activation = sys.modules.get("llmaas_plugins.activation")
    left = None if activation is None else activation.active_suite()
    while activation is not None and (suite := activation.active_suite()) is not None:
        suite.deactivate()
    assert left is None, "the test left a suite active; deactivate it"


@pytest.fixture(scope="session")
def packaged_model() -> Path:
    """Return the path of the packaged model."""
    from llmaas_plugins.reference_model import reference_model_path

    try:
        return reference_model_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def reference_model(packaged_model: Path) -> Path:
    """Return the packaged model, in whose place folders of tests may put ``light_model``."""
    return packaged_model


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that fills a folder once for all test workers (``shared_folder``)."""
    from shared_folders import base_of, shared_folder

    return functools.partial(shared_folder, base_of(tmp_path_factory))


@pytest.fixture(scope="session")
def light_model(packaged_model: Path, shared: Callable[..., Path]) -> Path:
    """Return the path of a model that evaluates tokens seven times as fast as the packaged one.

    It has two random layers of the same width, and the packaged model's vocabulary and file name.
    Its text is noise in which each token depends on all tokens before: wrong cells show at once.
    Its output has zeros for control and byte tokens, so that texts neither end nor are broken.
    """
    from gguf import GGMLQuantizationType, GGUFReader

    from llmaas_eval.models import Shape, write_random_model

    shape = Shape(n_layer=2, n_embd=256, n_head=8, n_head_kv=4, n_ff=256, n_ctx=1024)

    def fill(folder: Path) -> None:
        path = folder / packaged_model.name
        write_random_model(path, shape, GGMLQuantizationType.Q8_0)
        tensors = {tensor.name: tensor for tensor in GGUFReader(path, "r+").tensors}
        tensors["output.weight"].data[: 3 + 256] = 0

    return shared("light", fill) / packaged_model.name


@pytest.fixture
def make_llama(reference_model: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes a ``Llama`` on the packaged model; the test's end closes it."""
    from llama_cpp import Llama

    with contextlib.ExitStack() as stack:

        def make(**kwargs: Any) -> Llama:
            settings: dict[str, Any] = {"n_ctx": 256, "seed": 1, "verbose": False, "n_threads": 1}
            return stack.enter_context(
                contextlib.closing(Llama(str(reference_model), **(settings | kwargs)))
            )

        yield make


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Yield a function that activates kv_chunks with the test's own store.

    A second call deactivates the first suite, like a restart of the process.
    """
    from llmaas_plugins import activate

    with contextlib.ExitStack() as stack:

        def start(**table: Any) -> Any:
            stack.close()
            exact = {"codec": "lossless", "recompute": False}
            table = exact | {"store": str(tmp_path / "kv")} | table
            config = {"on_error": "raise", "plugins": {"kv_chunks": table}}
            return stack.enter_context(activate(config))

        yield start


@pytest.fixture
def reads_ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each read of chunks appends whether it was ahead of need."""
    from llmaas_plugins import _native

    read, found = _native.store_read, list[bool]()

    def reading(*args: Any, is_ahead: bool) -> Any:
        found.append(is_ahead)
        return read(*args, is_ahead=is_ahead)

    monkeypatch.setattr(_native, "store_read", reading)
    return found


@pytest.fixture
def dist_plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module with the plugins of ``tests/data/dist``, found as if installed."""
    monkeypatch.syspath_prepend(str(DIST))
    import llmaas_test_plugins

    llmaas_test_plugins.events.clear()
    return llmaas_test_plugins


@pytest.fixture
def patched() -> Iterator[Callable[..., Any]]:
    """Yield a function that installs the patches for plugin objects given as ``name=plugin``.

    The test's end reverts the patches.
    """
    from llmaas_hooks import HookManager
    from llmaas_patches import install

    with contextlib.ExitStack() as stack:

        def start(*, on_error: Any = "raise", **plugins: object) -> Any:
            hooks = HookManager(on_error)
            for name, plugin in plugins.items():
                hooks.register(name, plugin)
            stack.callback(hooks.shutdown)
            installed = install(hooks)
            stack.callback(installed.revert)
            return installed

        yield start
