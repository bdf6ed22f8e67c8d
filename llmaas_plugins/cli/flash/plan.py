"""``llmaas flash plan``: predicted time for a token in each mode within a memory budget."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import StoreError, TensorInfo
from llmaas_plugins.cli.flash.pack import tensors_of
from llmaas_plugins.cli.flash.plan_text import plan_text
from llmaas_plugins.cli.models import add_model_action
from llmaas_plugins.cli.options import at_least, positive
from llmaas_plugins.cli.output import print_report, progress_bar
from llmaas_plugins.run_record import run_record
from llmaas_plugins.server import import_server
from llmaas_plugins.sizes import memory_bytes

if TYPE_CHECKING:
    from llmaas_plugins.flash_weights.channel_header import Contents
    from llmaas_plugins.flash_weights.disk import Disk
    from llmaas_plugins.flash_weights.engine_modes import Hardware, Prediction
    from llmaas_plugins.flash_weights.model_sizes import ModelSizes
    from llmaas_plugins.flash_weights.planner import ModePlan

__all__ = ["add_plan", "channel_contents"]

_MIB = 1 << 20
_COMPUTING_S = 0.5
_LEAST_DEPTH = 4
"""Least reads in flight, because completed reads are not replaced between products."""
_CACHED = 0.5
"""Share of the channels in a cache, whose hit rate is printed."""
_WARM_TOKENS, _TOKENS = 32, 16
"""Tokens of ``--measure``: those that fill the cache, and those that are timed."""


def add_plan(actions: Any) -> None:
    """Register ``plan``."""
    parser = add_model_action(
        actions,
        "plan",
        plan,
        "predict the time for a token within a memory budget, and recommend settings",
        "Measure the disk, and predict the time for a token within a memory budget from that and "
        "the model's sizes: in the exact mode, in the sparse mode with each cache, without and "
        "with preloading, and in ActiveFlow's pipeline.",
        is_loaded=True,
    )
    parser.add_argument(
        "--memory-budget",
        type=_size,
        metavar="SIZE",
        help="memory of the whole process, as in llmaas.toml, e.g. 3 GiB (default: nine tenths of "
        "the memory that is available now, as without memory_budget in llmaas.toml)",
    )
    parser.add_argument(
        "--sparsity",
        type=_sparsity,
        metavar="S",
        help="share of values that the sparse mode leaves out (default: ActiveFlow's choice for "
        "the budget, 1 - budget / size)",
    )
    parser.add_argument(
        "--context",
        type=at_least(1),
        default=512,
        metavar="N",
        help="tokens in the context (default 512)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=10.0,
        help="seconds for measuring the disk (default 10)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="then open the model with the recommended settings, and print measured times beside "
        "the predicted ones",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def plan(args: argparse.Namespace) -> int:
    """Predict the time for a token in each mode, and recommend a mode."""
    from llmaas_plugins.flash_weights.channel_use import channel_uses
    from llmaas_plugins.flash_weights.model_sizes import metadata_of, sizes_of
    from llmaas_plugins.flash_weights.planner import check_budget, make_plan
    from llmaas_plugins.machine import release_memory, resident_bytes
    from llmaas_plugins.process_memory import obtainable_bytes

    tensors = tensors_of(args.model)
    source, notes = _source(args.model, tensors)
    contents, sparse_note = channel_contents(args.model, tensors)
    import_server()  # the plan holds for `llmaas serve`
    release_memory()
    process = resident_bytes()
    uses = channel_uses(contents) if contents else {}
    group_layers = contents.group_layers if contents else 1
    sizes = sizes_of(tensors, metadata_of(args.model), args.context, group_layers, uses=uses)
    budget = args.memory_budget
    if budget is None:
        budget = obtainable_bytes() // _MIB * _MIB
        notes.append(
            f"This plan is for {budget // _MIB} MiB, nine tenths of the memory that is available "
            "now: the budget where memory_budget is not set. `--memory-budget` plans for another."
        )
    check_budget(sizes, process, budget, args.context)  # before the slow measurements
    machine = _machine(source, args.seconds, process)
    made = make_plan(sizes, machine, budget, args.sparsity)
    if not made.sparse:
        notes.append("The model has no matrices whose channels could be read one by one.")
    elif sparse_note:
        notes.append(sparse_note)
    settings = _settings(made, machine.disk)
    if args.memory_budget is None:
        del settings["memory_budget"]
    measured = _measured(args, settings) if args.measure else None
    report = {
        "run": run_record(),
        "model": str(args.model),
        "planned_from": str(source),
        "machine": asdict(machine),
        **asdict(made),
        "channels": _channels(sizes, made.sparsity, contents),
        "settings": settings,
        "notes": notes,
        "measured": measured,
    }
    print_report(args, report, plan_text(args.model, made, machine, source, report))
    return 0


# -- inputs of the plan --------------------------------------------------------------------------


def _source(model: Path, tensors: Mapping[str, TensorInfo]) -> tuple[Path, list[str]]:
    """Return the file that the exact mode would read, and notes about that choice."""
    from llmaas_plugins.flash_weights.packed import packed_path, packed_problem

    path = packed_path(model)
    advice = f"`llmaas flash pack {model}` writes one, which makes products faster."
    if not path.exists():
        return model, [f"There is no packed file, so this plan is for the GGUF file. {advice}"]
    try:
        problem = packed_problem(path, model, tensors)
    except StoreError as error:
        problem = str(error)
    if problem is None:
        return path, []
    return model, [f"{path} cannot be used, so this plan is for the GGUF file: {problem}. {advice}"]


def channel_contents(
    model: Path, tensors: Mapping[str, TensorInfo]
) -> tuple[Contents | None, str | None]:
    """Return the channel file's contents, or a note that says why the file cannot be used."""
    from llmaas_plugins.flash_weights.channel_header import CHANNEL_FILE, MODEL, contents_of
    from llmaas_plugins.flash_weights.channels import channel_path
    from llmaas_plugins.flash_weights.container_file import ContainerFile
    from llmaas_plugins.flash_weights.model_weights import digest_of

    path = channel_path(model)
    advice = f"`llmaas flash pack --sparse {model}` writes one, which the sparse mode needs."
    if not path.exists():
        return None, f"There is no channel file yet: {advice}"
    try:
        with ContainerFile(path, CHANNEL_FILE) as file:
            if file.header.fields.get(MODEL) == digest_of(model):
                return contents_of(file.header, tensors), None
        problem = "it belongs to another model file"
    except (StoreError, ValueError) as error:
        problem = str(error)
    return None, f"{path} cannot be used: {problem}. {advice}"


def _channels(
    sizes: ModelSizes, sparsity: float, contents: Contents | None
) -> dict[str, Any] | None:
    """Return how channels are used at a sparsity, and which of that was measured."""
    from llmaas_plugins.flash_weights.pipeline import hit_rate, similarity

    if not sizes.channels:
        return None
    return {
        "similarity": similarity(sizes, sparsity),
        "cached": _CACHED,
        "hit_rate": hit_rate(sizes, _CACHED, sparsity),
        "measured": {
            "similarity": contents is not None and contents.foreseen is not None,
            "hit_rate": contents is not None and contents.magnitudes is not None,
        },
    }


def _machine(source: Path, seconds: float, process: int) -> Hardware:
    from llmaas_plugins.flash_weights.engine_modes import Hardware
    from llmaas_plugins.flash_weights.memory_bandwidth import memory_rate

    disk = _disk(source, seconds)
    return Hardware(disk, memory_rate(_n_threads(), _COMPUTING_S), process)


def _disk(source: Path, seconds: float) -> Disk:
    from llmaas_plugins.flash_weights.disk import measure_disk

    with progress_bar("measuring the disk", "s", math.ceil(seconds)) as bar:
        return measure_disk(source, seconds, bar.update)


def _n_threads() -> int:
    """Return the number of threads that ``Llama`` uses by default for single tokens."""
    return max((os.cpu_count() or 1) // 2, 1)


# -- the recommendation --------------------------------------------------------------------------


def _settings(made: ModePlan, disk: Disk) -> dict[str, Any]:
    """Return the recommended settings as a table of ``llmaas.toml``."""
    budget = made.budget
    settings: dict[str, Any] = {
        "memory_budget": f"{budget // _MIB} MiB" if budget % _MIB == 0 else budget
    }
    if made.recommended.mode == "sparse":
        keeps = made.recommended.keeps
        settings |= {"mode": "sparse", "sparsity": round(made.sparsity, 3), "cache": keeps}
        if made.recommended.preload:
            settings["preload"] = True
    return settings | (_reading(made.recommended, disk) if made.recommended.read else {})


def _reading(row: Prediction, disk: Disk) -> dict[str, Any]:
    """Return the fastest read settings for this disk.

    Reads ahead are long. Reads of columns on demand are short, because the first column of a read
    waits for the last.
    """
    if row.keeps in {None, "streamed"}:
        depth, size = max(disk.large_depth, _LEAST_DEPTH), disk.fast_sizes[-1]
        return {"queue_depth": depth, "read_size": f"{size >> 10} KiB"}
    return {
        "queue_depth": max(disk.small_depth, _LEAST_DEPTH),
        "read_size": f"{disk.fast_sizes[0] >> 10} KiB",
        "read_gap": f"{min(disk.gap_bytes, _MIB) >> 10} KiB",
    }


def _measured(args: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, float]:
    """Measure the seconds and the bytes read for a token with these settings."""
    from llama_cpp import Llama

    from llmaas_plugins.activation import activate
    from llmaas_plugins.machine import release_memory

    release_memory()  # so that the plan's own memory does not count in the measurement
    n_warm = min(_WARM_TOKENS, args.context // 2)
    n_timed = min(_TOKENS, args.context // 4)
    config = {"on_error": "raise", "plugins": {"flash_weights": dict(settings)}}
    with contextlib.ExitStack() as opened:
        suite = opened.enter_context(activate(config))
        llama = opened.enter_context(
            contextlib.closing(Llama(str(args.model), n_ctx=args.context, verbose=False))
        )
        bar = opened.enter_context(progress_bar("measuring tokens", "token", n_warm + n_timed))
        tokens = llama.generate([max(llama.token_bos(), 0)], temp=0.0)
        for _ in range(n_warm):
            next(tokens)
            bar.update()
        before, taken = _read_bytes(suite), []
        for _ in range(n_timed):
            began = time.perf_counter()
            next(tokens)
            taken.append(time.perf_counter() - began)
            bar.update()
        read = (_read_bytes(suite) - before) / n_timed
    return {"token_s": statistics.median(taken), "read": read}


def _read_bytes(suite: Any) -> int:
    models = suite.status()["plugins"]["flash_weights"]["models"]
    return sum(model["read_bytes"] for model in models)


# -- option values -------------------------------------------------------------------------------


def _size(text: str) -> int:
    try:
        size = memory_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, found {text!r}") from error
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return size


def _sparsity(text: str) -> float:
    from llmaas_plugins.flash_weights.planner import MOST_SPARSITY

    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MOST_SPARSITY:
        raise argparse.ArgumentTypeError(
            f"expected a share from 0 to {MOST_SPARSITY}, found {text!r}"
        )
    return number
