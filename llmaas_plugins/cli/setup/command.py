"""``llmaas setup``: prepare all that the plugins need for a model, and write the configuration."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import check_room, check_target, content_of
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action
from llmaas_plugins.cli.output import duration_text, print_report, size_text
from llmaas_plugins.cli.setup.config_text import check_ours
from llmaas_plugins.cli.setup.estimates import Estimates, estimates_of
from llmaas_plugins.cli.setup.improving import begin_improving, improve
from llmaas_plugins.cli.setup.processes import completed
from llmaas_plugins.cli.setup.running import Run
from llmaas_plugins.cli.setup.steps import STEPS, Job, improving_steps
from llmaas_plugins.machine import available_bytes, room, usable_processors
from llmaas_plugins.sizes import memory_bytes

__all__ = ["add_parser"]

_CONFIG = "llmaas.toml"


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = add_model_action(
        subparsers,
        "setup",
        setup,
        "prepare a model for all plugins, and write llmaas.toml",
        "Prepare all that the plugins need for a model, and write a commented llmaas.toml, with "
        "which apps use the model's levels, packed weights and datastore without a change. It says "
        "first what it does and how long that takes. Stop it at any time: the same command goes "
        "on. Better widths are searched in the background afterwards.",
    )
    add = parser.add_argument
    add(
        "--chats",
        nargs="+",
        type=Path,
        default=[],
        metavar="EXPORT",
        help="chats for the datastore: ChatGPT's conversations.json, or OpenAI-style JSON or JSONL "
        "(default: no datastore)",
    )
    add(
        "--memory",
        type=_memory,
        metavar="SIZE",
        help="memory of the app's process, such as 3 GiB, or a share of the machine's, such as "
        "60%%; weights that do not fit are streamed (default: nine tenths of what is available)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path(_CONFIG),
        metavar="FILE",
        help=f"configuration to write (default: {_CONFIG} in this folder)",
    )
    add("--skip", nargs="+", choices=STEPS, default=[], metavar="STEP",
        help=f"steps to leave out: {', '.join(STEPS)}")  # fmt: skip
    background = parser.add_mutually_exclusive_group()
    background.add_argument(
        "--no-improve", action="store_true", help="search no better widths in the background"
    )
    background.add_argument(
        "--improve",
        action="store_true",
        help="search better widths now, in the foreground, for a model that is set up",
    )
    add("--dry-run", action="store_true", help="print the steps with estimates, and stop")
    add("--json", action="store_true", help="print the result as JSON")


def setup(args: argparse.Namespace) -> int:
    """Set a model up."""
    job, path = _job(args), args.output.absolute()
    check_target(path, "-o")
    check_ours(path)
    if args.improve:
        with stoppable("the same command goes on"):
            improve(Run(job, path, args.memory, _say))
        return 0
    with stoppable("the same command goes on"):
        return _set_up(args, job, path)


# -- inside --------------------------------------------------------------------------------------


def _job(args: argparse.Namespace) -> Job:
    if not args.model.is_file():
        raise ConfigError(f"found no file {args.model}; expected a model in GGUF.")
    for chat in args.chats:
        content_of(chat)  # an unreadable export is refused before anything takes minutes
    from llmaas_plugins.elastic.metadata import read_elastic

    chats = tuple(chat.absolute() for chat in args.chats)
    elastic = read_elastic(args.model)
    tables = () if elastic is None else elastic.tables
    table = next((name for name in ("searched", "uniform") if name in tables), None)
    return Job(args.model.absolute(), chats, frozenset(args.skip), table)


def _set_up(args: argparse.Namespace, job: Job, path: Path) -> int:
    _say(_about(job))
    run = Run(job, path, args.memory, _say)
    run.check_made()
    estimates = estimates_of(job)
    if estimates.problem is not None:
        _say(f"elastic and deadlines are left out: {estimates.problem}")
        job = replace(job, skipped=job.skipped | {"prepare"})
        run = Run(job, path, args.memory, _say)
    for line in _announced(run, estimates):
        _say(line)
    report: dict[str, Any] = {
        "config": str(path),
        "disk_bytes": estimates.disk_bytes,
        "problem": estimates.problem,
        "steps": [
            {
                "name": step.name,
                "command": " ".join(("llmaas", *step.arguments)),
                "estimated_s": estimates.seconds.get(step.name),
                "is_done": run.is_done(step),
            }
            for step in run.steps
        ],
    }
    if args.dry_run:
        print_report(args, report, ())
        return 0
    check_room("setup", estimates.disk_bytes, job.made)
    report["seconds"] = run.all()
    status, report["doctor"] = _doctor(args, job, path)
    if not args.no_improve and job.is_prepared_here:
        report["improving"] = begin_improving(run, args)
    print_report(args, report, _then(args, job, report, estimates))
    return status


def _about(job: Job) -> str:
    """Return a line about the model and the machine."""
    free = room(job.made).free_bytes
    return (
        f"{job.model.name}: {size_text(job.model.stat().st_size)}. This machine: "
        f"{usable_processors()} processors, {size_text(available_bytes())} of memory available, "
        f"{size_text(free)} free on disk."
    )


def _announced(run: Run, estimates: Estimates) -> Iterator[str]:
    """Yield the steps with estimates."""
    left_s = 0.0
    for i, step in enumerate(run.steps, 1):
        seconds = estimates.seconds.get(step.name)
        time = "no estimate" if seconds is None else f"about {duration_text(seconds)}"
        is_done = run.is_done(step)
        left_s += 0 if is_done else seconds or 0
        yield f"{i}. {step.name}: {step.what}, {'done' if is_done else time}"
    yield (
        f"about {duration_text(left_s)} together, and up to {size_text(estimates.disk_bytes)} of "
        f"disk in {run.job.made.parent}"
    )


def _doctor(args: argparse.Namespace, job: Job, path: Path) -> tuple[int, Any]:
    """Check the configuration with the model; return the exit status and the report."""
    arguments = ["doctor", "--model", str(job.model), "--config", str(path)]
    if not args.json:
        return completed(arguments, shows_output=True).returncode, None
    done = completed([*arguments, "--json"])
    return done.returncode, json.loads(done.stdout)


def _then(
    args: argparse.Namespace, job: Job, report: dict[str, Any], estimates: Estimates
) -> Iterator[str]:
    """Yield what to do next."""
    yield ""
    config = "" if args.output == Path(_CONFIG) else f" --config {args.output}"
    yield f"{report['config']} is written. Apps need no change: they load {args.model} as before."
    yield f"    llmaas run{config} app.py"
    yield f"    llmaas serve{config} --model {args.model}"
    if (improving := report.get("improving")) is not None:
        seconds = sum(estimates.seconds.get(step.name, 0) for step in improving_steps(job))
        yield (
            f"Better widths are searched in the background, for about {duration_text(seconds)} "
            f"(process {improving['pid']}; log: {improving['log']})."
        )


def _memory(text: str) -> str:
    try:
        memory_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, found {text!r}") from error
    return text


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
