"""``llmaas run``: an unchanged app with the suite active, run as ``python`` would run it."""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import logging
import os
import runpy
import signal
import sys
import zipfile
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from llmaas_hooks import ConfigError
from llmaas_plugins.activation import activate
from llmaas_plugins.cli.doctor.resources import say_problems
from llmaas_plugins.cli.interrupts import give_signals_back
from llmaas_plugins.cli.options import add_config_option
from llmaas_plugins.config import load_config

__all__ = ["add_parser", "run"]

_log = logging.getLogger("llmaas.cli")
_USAGE = "llmaas run [--config FILE] [--plugins a,b] (-m MODULE | SCRIPT) [args ...]"


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "run", usage=_USAGE, help="run a Python app with the plugins active", allow_abbrev=False
    )
    add_config_option(parser)
    parser.add_argument(
        "--plugins", metavar="a,b", help="enable exactly these plugins, like $LLMAAS_PLUGINS"
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        help="run this module as __main__, with the arguments after it",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="run this script, with the arguments after it"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Activate the suite, run the app in this process, and deactivate the suite.

    Signals have the same effect on the app as without us. Its ``SystemExit`` passes through to the
    interpreter. Any other exception goes to ``sys.excepthook``, without our frames. A Ctrl-C that
    the app does not handle ends ``llmaas run`` like any command, unless the app has an excepthook.

    Returns:
        0, or 1 after an exception.

    Raises:
        ConfigError: The configuration is wrong, or the script or module does not exist.
    """
    argv = [*args.module, *args.script]
    if not argv:
        args.parser.error("a SCRIPT or -m MODULE is required")
    app = _Module(argv) if args.module else _Script(argv)
    environ = dict(os.environ)
    if args.plugins is not None:
        environ["LLMAAS_PLUGINS"] = args.plugins
    suite = activate(load_config(args.config, environ))
    _log.info("plugins: %s", ", ".join(suite.hooks.names()) or "none")
    say_problems(suite.config)
    try:
        give_signals_back()
        app.execute()
    except KeyboardInterrupt as error:
        if sys.excepthook is sys.__excepthook__:
            raise
        _show(error)
        return 128 + signal.SIGINT
    except Exception as error:
        _show(error)
        return 1
    finally:
        suite.deactivate()
    return 0


def _show(error: BaseException) -> None:
    error.__traceback__ = _app_frames(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)


class _Module:
    """``python -m NAME args``."""

    def __init__(self, argv: list[str]) -> None:
        self._name = argv[0]
        _set_process(argv, Path.cwd())
        top = self._name.partition(".")[0]
        try:  # the top package only: finding a submodule would import its package too early
            found = importlib.util.find_spec(top)
        except ValueError:  # a module without __spec__ is loaded under that name
            return
        if found is None:
            raise ConfigError(f"no module named {top!r}. Is it installed for {sys.executable}?")

    def execute(self) -> None:
        # This is what the interpreter itself calls for `-m`. The public run_module removes
        # `__main__` at
        # the end of the module, while its threads and atexit functions still need it.
        _new_main()
        runpy._run_module_as_main(self._name)  # type: ignore[attr-defined]  # noqa: SLF001


class _Script:
    """``python FILE args``, or a directory or zip file with a ``__main__.py``."""

    def __init__(self, argv: list[str]) -> None:
        self._path = Path(argv[0]).absolute()
        if not self._path.exists():
            raise ConfigError(f"no such script: {argv[0]}. For a module, use `llmaas run -m`.")
        self._is_source = self._path.is_file() and not _is_compiled(self._path)
        self._refuse_no_script(argv[0])
        _set_process(argv, self._path.resolve().parent if self._is_source else None)

    def _refuse_no_script(self, name: str) -> None:
        try:
            if self._is_source and b"\0" in self._path.read_bytes():
                raise ConfigError(f"{name} is a binary file, expected a Python script.")
        except OSError as error:
            raise ConfigError(f"cannot read {name}: {error.strerror}") from error
        is_package = self._path.is_dir() or zipfile.is_zipfile(self._path)
        if is_package and PathFinder.find_spec("__main__", [str(self._path)]) is None:
            raise ConfigError(f"{name} has no __main__.py. Name the script to run.")

    def execute(self) -> None:
        if not self._is_source:
            runpy.run_path(str(self._path), run_name="__main__")
            return
        loader = SourceFileLoader("__main__", str(self._path))
        module = _new_main()
        module.__file__, module.__loader__ = loader.path, loader
        code = loader.source_to_code(loader.get_data(loader.path), loader.path)
        exec(code, module.__dict__)  # noqa: S102  the user asked to run this code


def _new_main() -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def _is_compiled(path: Path) -> bool:
    return path.suffix == ".pyc" or zipfile.is_zipfile(path)


def _set_process(argv: list[str], folder: Path | None) -> None:
    """Set ``sys.argv`` and ``sys.path[0]`` as the interpreter does."""
    sys.argv = list(argv)
    if not sys.flags.safe_path:
        sys.path[:1] = [] if folder is None else [str(folder)]


def _app_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the app's first frame on."""
    ours = (__file__, runpy.__file__, "<frozen ")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace
