"""``llmaas tune``: measure what each plugin gains here, and switch on what is worth it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import check_target, content_of
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action, check_file
from llmaas_plugins.cli.options import add_config_option, positive
from llmaas_plugins.cli.output import print_report
from llmaas_plugins.cli.setup.config_text import write_switches
from llmaas_plugins.cli.switches import switched, switches
from llmaas_plugins.config import load_config
from llmaas_plugins.model.made_files import file_in_place_of

if TYPE_CHECKING:
    from llmaas_plugins.cli.tune.parts import Outcome, Plan

__all__ = ["add_parser", "tune"]

_MINUTES = 30.0
_MOST_TEXT = 1 << 18
"""Bytes of a text that are read: more than all requests need."""
_THEN = "what was measured is kept; the same command goes on"


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = add_model_action(
        subparsers,
        "tune",
        tune,
        "measure the plugins on a model, and switch on what is worth it",
        "Measure what each configured plugin gains and costs on this model and this machine, "
        "against stock llama.cpp, and switch the plugins in llmaas.toml on or off. Nothing else in "
        "that file changes. Exit status 1 means that a plugin failed or broke a promise. Stop it "
        "at any time: the same command goes on.",
    )
    add_config_option(parser)
    add = parser.add_argument
    add(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="text to measure on, best of the kind that the model will see (default: packaged "
        "conversations)",
    )
    add(
        "--chats",
        nargs="+",
        type=Path,
        default=[],
        metavar="EXPORT",
        help="chats to judge the datastore with (default: some of its own, taken out of a copy)",
    )
    add(
        "--minutes",
        type=positive,
        default=_MINUTES,
        metavar="N",
        help="minutes for all measurements (default: %(default)g), after which the rest is "
        "left out; small models need fewer",
    )
    add("--fresh", action="store_true", help="measure again what is known")
    add("--dry-run", action="store_true", help="leave llmaas.toml as it is")
    add("--json", action="store_true", help="print the result as JSON")


def tune(args: argparse.Namespace) -> int:
    """Measure the plugins, and switch them; return 1 if one failed."""
    from llmaas_plugins.cli.tune.parts import measured
    from llmaas_plugins.cli.tune.record import Record, record_path

    plan, path = _plan(args)
    kept = record_path(path)
    check_target(kept, "--config")
    with stoppable(_THEN):
        outcomes = measured(plan, Record(kept, plan.model), _say, is_fresh=args.fresh)
    changes = _switch(args, path, outcomes)
    report = {
        "config": str(path),
        "kept": str(kept),
        "ok": all(outcome.verdict.is_passed for outcome in outcomes.values()),
        "plugins": {name: _plain(outcome) for name, outcome in outcomes.items()},
        "changes": changes,
    }
    print_report(args, report, _text(args, outcomes, report))
    return 0 if report["ok"] else 1


# -- inside --------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> tuple[Plan, Path]:
    """Return what to measure, and the path of the configuration.

    Raises:
        ConfigError: A file is missing, or there is nothing to measure.
    """
    from llmaas_plugins.cli.tune.parts import Plan, parts_of

    check_file(args.model)
    # which plugins are on, and their settings, are the file's: others would be measured in vain
    environ = {name: value for name, value in os.environ.items() if "LLMAAS_PLUGINS" not in name}
    config, model = load_config(args.config, environ), args.model.absolute()
    setup = f"`llmaas setup {args.model}`"
    if config.file is None:
        raise ConfigError(f"found no llmaas.toml to tune: {setup} writes one.")
    if not parts_of(config):
        raise ConfigError(f"{config.file} has no plugin that can be measured: {setup} adds some.")
    path = config.file.expanduser().resolve()  # not a link to it
    switched(path.read_text("utf-8"), dict.fromkeys(parts_of(config), False))
    texts = [content_of(text)[:_MOST_TEXT] for text in args.text] or _packaged()
    for export in args.chats:
        content_of(export)
    made = file_in_place_of(model, config.models, setup)
    return Plan(model, made, config, tuple(texts), tuple(args.chats), args.minutes), path


def _packaged() -> list[bytes]:
    """Return packaged text of a kind that no calibration has read."""
    from llmaas_plugins.cli.given_text import packaged_conversations

    return [text.encode() for text in packaged_conversations()]


def _switch(
    args: argparse.Namespace, path: Path, outcomes: Mapping[str, Outcome]
) -> dict[str, bool]:
    """Switch the plugins, unless the run is dry; return those that change."""
    choice = {
        name: outcome.verdict.state == "on"
        for name, outcome in outcomes.items()
        if outcome.verdict.state != "left out"
    }
    before = switches(path.read_text("utf-8"))
    changes = {
        name: choice[name] for name in choice.keys() & before if choice[name] != before[name]
    }
    if changes and not args.dry_run:
        write_switches(path, changes)
    return changes


def _plain(outcome: Outcome) -> dict[str, Any]:
    figures = outcome.figures
    return {
        "verdict": outcome.verdict.state,
        "reason": outcome.verdict.reason,
        "figures": None if figures is None else figures.model_dump(mode="json"),
    }


def _text(
    args: argparse.Namespace, outcomes: Mapping[str, Outcome], report: Mapping[str, Any]
) -> Iterator[str]:
    from llmaas_plugins.cli.tune.table import reasons, table

    yield from table(outcomes)
    yield ""
    yield from reasons(outcomes)
    yield ""
    states = ", ".join(f"{n} {'on' if on else 'off'}" for n, on in report["changes"].items())
    if not states:
        yield f"{report['config']} stays as it is."
    elif args.dry_run:
        yield f"Without --dry-run, {report['config']} would change: {states}."
    else:
        yield f"{report['config']} was changed: {states}."
    yield f"The figures are kept in {report['kept']}."


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
