"""``llmaas setup``: prepare all that the plugins need for a model, and write the configuration."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmaas_hooks import ConfigError
from llmaas_plugins.chats.exports import load_conversations
from llmaas_plugins.cli.doctor.resources import store_user
from llmaas_plugins.cli.files import check_room, check_target
from llmaas_plugins.cli.flash.pack import tensors_of
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action, check_file, identified
from llmaas_plugins.cli.output import duration_text, print_report, size_text
from llmaas_plugins.cli.setup.config_text import check_ours
from llmaas_plugins.cli.setup.estimates import Estimates, estimates_of
from llmaas_plugins.cli.setup.improving import begin_improving, improve
from llmaas_plugins.cli.setup.processes import completed
from llmaas_plugins.cli.setup.running import Run
from llmaas_plugins.cli.setup.steps import STEPS, Job, improving_steps
from llmaas_plugins.files.json_text import parse_json
from llmaas_plugins.files.temporary_folder import folder_beside
from llmaas_plugins.machine import (
    available_bytes,
    release_memory,
    resident_bytes,
    room,
    total_bytes,
    usable_processors,
)
from llmaas_plugins.server import import_server
from llmaas_plugins.sizes import memory_bytes

__all__ = ["add_parser"]

_CONFIG = "llmaas.toml"
_N_CTX = 512
"""Tokens of the shortest context that must have room: the default of ``Llama``."""


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
        "on. The levels are improved in the background afterwards.",
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
        "--no-improve", action="store_true", help="improve nothing in the background"
    )
    background.add_argument(
        "--improve",
        action="store_true",
        help="improve the levels now, in the foreground, for a model that is set up",
    )
    add("--dry-run", action="store_true", help="print the steps with estimates, and stop")
    add("--json", action="store_true", help="print the result as JSON")


def setup(args: argparse.Namespace) -> int:
    """Set a model up."""
    job, path = _job(args), args.output.absolute()
    check_target(path, "-o")
    check_ours(path)
    _check_options(args, job)
    with stoppable("the same command goes on"):
        if args.improve:
            seconds = improve(Run(job, path, args.memory, _say))
            print_report(args, {"config": str(path), "seconds": seconds}, ())
            return 0
        return _set_up(args, job, path)


# -- inside --------------------------------------------------------------------------------------


def _job(args: argparse.Namespace) -> Job:
    """Return what to set up, with its files checked."""
    from llmaas_plugins.elastic.metadata import read_elastic

    check_file(args.model)
    model, chats = args.model.absolute(), tuple(chat.absolute() for chat in args.chats)
    if not str(model).isprintable():  # llmaas.toml could not name it
        raise ConfigError(f"{str(model)!r} has characters that cannot be printed: rename it.")
    if args.memory and not args.improve:  # before the chats take memory
        _check_memory(model, args.memory)
    for chat in chats:  # a file that is no export is refused before anything takes minutes
        load_conversations(chat)
    elastic = read_elastic(model)
    tables = () if elastic is None else elastic.tables
    table = next((name for name in ("searched", "uniform") if name in tables), None)
    job = Job(model, identified(model), chats, frozenset(args.skip), table)
    if job.is_prepared_here and (problem := _no_levels(model)) is not None:
        _say(f"elastic and deadlines are left out: {problem}")
        job = replace(job, skipped=job.skipped | {"prepare"})
    return job


def _check_memory(model: Path, memory: str) -> None:
    """Refuse memory that is too little for the model, before anything takes minutes.

    Raises:
        ConfigError: The model is no GGUF file, or the machine has less memory.
        UnmetBudgetError: Not even a short context can run in it, with all weights streamed.
    """
    from llmaas_plugins.flash_weights.model_sizes import metadata_of, sizes_of, whole_bytes
    from llmaas_plugins.flash_weights.planner import check_budget

    tensors, metadata = tensors_of(model), metadata_of(model)
    import_server()  # the process is to be as large as that of `llmaas serve`
    release_memory()
    budget, process = memory_bytes(memory), resident_bytes()
    if budget > (most := total_bytes()):
        raise ConfigError(f"--memory is {memory}, expected at most {size_text(most)}.")
    if budget < process + whole_bytes(tensors, metadata):
        check_budget(sizes_of(tensors, metadata, _N_CTX), process, budget, _N_CTX)


def _no_levels(model: Path) -> str | None:
    """Return why a model's family cannot have levels; None if it can."""
    from llmaas_plugins.elastic.units import blocks_of

    try:
        blocks_of(model)
    except ConfigError as error:
        return str(error)
    return None


def _check_options(args: argparse.Namespace, job: Job) -> None:
    if args.memory and "pack" in job.skipped:
        raise ConfigError("--memory has no effect with `--skip pack`: leave one of the two out.")
    if args.improve and args.dry_run:
        raise ConfigError("--dry-run has no effect with --improve: leave one of the two out.")


def _set_up(args: argparse.Namespace, job: Job, path: Path) -> int:
    _say(_about(job))
    run = Run(job, path, args.memory, _say)
    left = {step.name for step in run.steps if not run.is_done(step)}
    _check_folder(job, left)
    estimates = estimates_of(job)
    for line in _announced(run, estimates, left):
        _say(line)
    report: dict[str, Any] = {
        "config": str(path),
        "disk_bytes": estimates.disk_bytes,
        "steps": [
            {
                "name": step.name,
                "command": step.command,
                "estimated_s": estimates.seconds.get(step.name),
                "is_done": step.name not in left,
            }
            for step in run.steps
        ],
    }
    if args.dry_run:
        print_report(args, report, ())
        return 0
    if left & {"prepare", "pack"}:
        check_room("setup", estimates.disk_bytes, job.made)
    report["seconds"] = run.all()
    status, report["doctor"] = _doctor(args, job, path)
    if status and (who := store_user(path)) is not None:
        _say(
            f"All is made, but the store of contexts is in use by {who}, so kv_chunks could not be "
            "tried. Stop that process, then repeat the command."
        )
    if status == 0 and not args.no_improve and job.is_prepared_here:
        report["improving"] = begin_improving(run, args)
    print_report(args, report, _then(args, job, report, estimates, is_fine=status == 0))
    return status


def _check_folder(job: Job, left: set[str]) -> None:
    """Check the folder of the model before anything takes minutes.

    Raises:
        StoreError: The folder cannot be written.
    """
    if left & {"prepare", "pack"}:
        then = " The files are written beside the model: link it into a folder that can be written."
        with folder_beside(job.made, then):
            pass


def _about(job: Job) -> str:
    """Return a line about the model and the machine."""
    free = room(job.made).free_bytes
    return (
        f"{job.model.name}: {size_text(job.model.stat().st_size)}. This machine: "
        f"{usable_processors()} processors, {size_text(available_bytes())} of memory available, "
        f"{size_text(free)} free on disk."
    )


def _announced(run: Run, estimates: Estimates, left: set[str]) -> Iterator[str]:
    """Yield the steps with estimates; ``left`` names those that are not done."""
    for i, step in enumerate(run.steps, 1):
        seconds = estimates.seconds.get(step.name)
        time = "no estimate" if seconds is None else f"about {duration_text(seconds)}"
        yield f"{i}. {step.name}: {step.what}, {time if step.name in left else 'done'}"
    if not left:
        yield "all is made already: nothing is left to do"
        return
    known = [estimates.seconds[name] for name in left if name in estimates.seconds]
    unknown = [step.name for step in run.steps if step.name in left - estimates.seconds.keys()]
    which = f"without {' and '.join(unknown)}" if unknown else "together"
    yield (
        f"about {duration_text(sum(known))} {which}, and up to {size_text(estimates.disk_bytes)} "
        f"of disk in {run.job.made.parent}"
    )


def _doctor(args: argparse.Namespace, job: Job, path: Path) -> tuple[int, Any]:
    """Check the configuration with the model; return the exit status and the report."""
    arguments = ["doctor", "--model", str(job.model), "--config", str(path)]
    if not args.json:
        return completed(arguments, has_settings=True, shows_output=True).returncode, None
    done = completed([*arguments, "--json"], has_settings=True)
    return done.returncode, parse_json(done.stdout or "null")


def _then(
    args: argparse.Namespace,
    job: Job,
    report: dict[str, Any],
    estimates: Estimates,
    *,
    is_fine: bool,
) -> Iterator[str]:
    """Yield what to do next."""
    yield ""
    yield f"{report['config']} is written."
    if not is_fine:
        yield "Correct the problems above, then repeat the command."
        return
    is_found = args.output == Path(_CONFIG) and "LLMAAS_CONFIG" not in os.environ
    config = "" if is_found else f" --config {shlex.quote(str(args.output))}"
    yield f"Apps need no change: they load {args.model} as before."
    yield f"    llmaas run{config} app.py"
    yield f"    llmaas serve{config} --model {shlex.quote(str(args.model))}"
    yield "Then measure what each plugin gains here, and switch off those that gain nothing:"
    yield f"    llmaas tune{config} {shlex.quote(str(args.model))}"
    if (improving := report.get("improving")) is not None:
        seconds = sum(estimates.seconds.get(step.name, 0) for step in improving_steps(job))
        process = "" if improving["pid"] is None else f"process {improving['pid']}; "
        yield (
            f"The levels are improved in the background, for about {duration_text(seconds)} "
            f"({process}log: {improving['log']})."
        )


def _memory(text: str) -> str:
    from llmaas_plugins.flash_weights.config import FlashWeightsConfig

    try:
        FlashWeightsConfig(memory_budget=text)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise argparse.ArgumentTypeError(f"{message}, found {text!r}") from error
    return text


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
