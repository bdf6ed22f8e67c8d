"""The command ``llmaas``: its options and its sub-commands."""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from llmaas_hooks import LlmaasError
from llmaas_hooks.discovery import suggest
from llmaas_plugins import __version__
from llmaas_plugins.cli.options import unrecognized
from llmaas_plugins.cli.output import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["run_command"]

# Each module exposes `add_parser(subparsers)`, which adds one parser and sets its default `func`, a
# function of the parsed arguments that returns the exit code. A parser with `takes_rest=True` also
# passes `func` the list of options that it did not declare; for other parsers these are errors.
_COMMANDS = (
    *("setup", "tune", "run", "serve", "status", "demo", "plugins", "doctor", "store", "datastore"),
    *("flash", "elastic", "deadlines", "prompts"),
)


def run_command(argv: Sequence[str] | None) -> int:
    """Run ``llmaas`` with ``argv`` and return its exit status; show our own errors in one line."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_rest:
        args.parser.error(unrecognized(rest, args.parser))
    _log_to_stderr(args.verbose)
    try:
        return int(args.func(args, rest) if args.takes_rest else args.func(args))
    except LlmaasError as error:
        logging.getLogger("llmaas").debug("the error came from here:", exc_info=error)
        message = one_line(" ".join(str(error).split()))  # errors may quote files
        print(f"llmaas: error: {message}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Argument parser whose error messages fit in one line, whatever was typed."""

    def __init__(self, **options: Any) -> None:
        """Make a parser; the one of the chosen action becomes ``args.parser``."""
        super().__init__(**options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Print the message in one line, with the nearest choice for a mistyped one, and exit."""
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            message += "." + suggest(found[1], re.findall(r"[\w-]+", found[2]))
        elif message.startswith("the following arguments are required: ") and "--" not in message:
            greedy = [one.option_strings[-1:] for one in self._actions if one.nargs == "+"]
            if names := [name for found in greedy for name in found]:
                message += f". Put it before {' and '.join(names)}, which take all that follows."
        super().error(one_line(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="llmaas",
        description="Plugins for llama-cpp-python apps: persistent contexts, streamed weights, "
        "elastic models and next-token mixing.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"llmaas {__version__}")
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="log what the suite does; give it twice to log details and the causes of errors",
    )
    parser.set_defaults(takes_rest=False)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in _COMMANDS:
        _add_command(subparsers, name)
    return parser


def _add_command(subparsers: Any, name: str) -> None:
    try:
        module = importlib.import_module(f"llmaas_plugins.cli.{name}")
    except ImportError as error:
        parser = subparsers.add_parser(name, help=f"(cannot be loaded: {error})", add_help=False)
        parser.set_defaults(func=_unavailable(name, error), takes_rest=True)
    else:
        module.add_parser(subparsers)


def _unavailable(name: str, error: ImportError) -> Callable[..., int]:
    missing = f"`llmaas {name}` cannot be loaded: {error}. "

    def refuse(*_: object) -> int:
        raise LlmaasError(missing + "Try `pip install 'llmaas-plugins[server]'`.")

    return refuse


def _log_to_stderr(verbose: int) -> None:
    """Log to stderr from the suite's logger only: the root logger belongs to the app of ``run``."""
    if not verbose:
        return
    logger = logging.getLogger("llmaas")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
