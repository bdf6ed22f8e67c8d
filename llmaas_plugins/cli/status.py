"""``llmaas status``: one page about a running service."""

from __future__ import annotations

import http.client
import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import LlmaasError
from llmaas_plugins.cli.output import counted, one_line, print_report, setting_text, size_text
from llmaas_plugins.cli.store_actions import expanded

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]

_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 30
_LINES = textwrap.TextWrapper(100, "  ", "  ", break_long_words=False, break_on_hyphens=False)
_PARTS = (("queue", int), ("memory", dict), ("plugins", dict), ("errors", dict))
"""Parts of a status that the page is made of, which a service of another version may lack."""
_BYTES = ("bytes", "budget", "in_force")
"""Ends of the names of counters that are bytes."""


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "status",
        help="show what a running service does: its calls, memory by owner, and plugins",
        description="Ask a running `llmaas serve` for its calls, for the memory by owner, and for "
        "the counters of its plugins that are not 0, and print one page. --json prints all.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default=_URL, help="address of the service (default: %(default)s)")
    where.add_argument("--uds", type=Path, metavar="PATH", help="Unix socket of the service")
    parser.add_argument(
        "--key-env",
        metavar="NAME",
        help="environment variable that contains the administrator's key (`serve --api_key`), if "
        "the service has keys",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=status)


def status(args: argparse.Namespace) -> int:
    """Print what a service tells about itself."""
    address = args.url if args.uds is None else f"unix:{expanded(args.uds)}"
    found = _told(address, _key(args.key_env))
    print_report(args, found, _text(address, found))
    return 0


# -- inside --------------------------------------------------------------------------------------


def _key(variable: str | None) -> str | None:
    """Return the key in a variable. Errors never quote the name, which may be a key by mistake.

    Raises:
        ConfigError: The variable is not set, or its value cannot be sent.
    """
    from llmaas_plugins.server.api_keys import key_in

    if variable is None:
        return None
    named = "the variable that --key-env names"
    return key_in(os.environ.get(variable), named, "Set it to the key.")


def _told(address: str, key: str | None) -> dict[str, Any]:
    """Ask a service for its status.

    Raises:
        LlmaasError: Nothing listens there, it is no service of this suite, or it refuses the key.
    """
    from llmaas_plugins.server.client import LLMClient

    wrong = f"{address} is not the address of `llmaas serve`"
    try:
        found: object = LLMClient(address, key, _TIMEOUT_S).request("GET", "/status")
    except LlmaasError as error:
        then = "; --key-env NAME names the variable with the administrator's key"
        raise LlmaasError(f"{error}{then if 'key' in str(error) else ''}.") from error
    except (ConnectionRefusedError, FileNotFoundError) as error:  # it says what to do
        raise LlmaasError(str(error)) from error
    except OSError as error:
        raise LlmaasError(f"{address} does not answer: {error.strerror or error}.") from error
    except (LookupError, ValueError, http.client.HTTPException) as error:
        raise LlmaasError(f"{wrong}: {error}.") from error
    if not (isinstance(found, dict) and all(isinstance(found.get(n), k) for n, k in _PARTS)):
        raise LlmaasError(f"{wrong}: its answer has another form.")
    return found


def _text(address: str, found: Mapping[str, Any]) -> Iterator[str]:
    from llmaas_plugins.memory.owners import owner_lines

    yield one_line(f"{address}: {counted(found['queue'], 'call')} running or waiting")
    calls = {name: value for name, value in found.items() if isinstance(value, int | float)}
    yield from _section("calls", calls)
    yield "[memory by owner]"
    yield from (f"  {one_line(line)}" for line in owner_lines(found["memory"]))
    sections = {name: found[name] for name in ("together", "cloud") if name in found}
    for name, report in {**sections, **found["plugins"]}.items():
        yield from _section(name, report or {})
    for plugin, failures in found["errors"].items():
        for hook, failure in failures.items():
            times = counted(failure["count"], "time")
            yield one_line(f"!! {plugin} failed {times} in {hook}, at last: {failure['last']}")


def _section(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the plain values of a report, and why a plugin leaves a model alone."""
    from llmaas_plugins.cli.doctor.trial import left_alone

    yield one_line(f"[{name}]")
    yield from _LINES.wrap(one_line(_joined(report)))
    if (reason := left_alone(dict(report))) is not None:
        yield one_line(f"  left alone: {reason}")


def _joined(values: Mapping[str, Any]) -> str:
    """Return plain values that are not 0, with their names."""
    found = {name: _plain(name, value) for name, value in values.items()}
    return ", ".join(f"{name}={text}" for name, text in found.items() if text)


def _plain(name: str, value: object) -> str:
    """Return a number, a text, or numbers by name, such as tokens by level; else nothing."""
    if isinstance(value, Mapping) and all(map(_is_number, value.values())):
        return f"({numbers})" if (numbers := _joined(value)) else ""
    if not isinstance(value, bool | int | float | str) or value == 0:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and name.endswith(_BYTES):
        return size_text(value)
    return setting_text(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
