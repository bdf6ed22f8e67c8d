"""``llmaas elastic recover``: adapters that win back part of what the levels lose."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, FileStamp, StoreError
from llmaas_plugins.cli.files import check_room
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.learning_text import (
    add_text_option,
    learning_windows,
    own_text_path,
)
from llmaas_plugins.cli.models import add_model_action
from llmaas_plugins.cli.options import at_least, require_torch
from llmaas_plugins.cli.output import counted, duration_text, print_report, progress_bar, size_text
from llmaas_plugins.cli.progress_folder import progress_folder, remove_progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.parts import LevelAdapters
    from llmaas_plugins.elastic.units import Widths
    from llmaas_plugins.training.recovery import Outcome, Recipe, Texts
    from llmaas_plugins.training.student import Level, Teacher
    from llmaas_plugins.training.trainer import Kept
    from llmaas_plugins.training.workers import Workers

__all__ = ["add_recover"]

_N_TOKENS, _N_QUICK = 262_144, 8_192
_RANK, _MOST_RANK = 8, 64
_LEAST_TOKENS, _WINDOW = 2_048, 512

_log = logging.getLogger("llmaas.cli")


def add_recover(actions: Any) -> None:
    """Register ``recover``."""
    parser = add_model_action(
        actions,
        "recover",
        recover,
        "learn adapters that win back part of what the levels of a prepared model lose",
        "Learn a small adapter for each level of a prepared model, by the predictions of the whole "
        "model, and write the adapters into the file. A level whose predictions its adapter does "
        "not improve, on text held out, gets none. Needs torch: pip install "
        "'llmaas-plugins[train]'; it uses a GPU that torch can use, unless CUDA_VISIBLE_DEVICES is "
        "empty. Stop it at any time: the same command goes on. `torchrun "
        "--nproc-per-node N -m llmaas_plugins.cli.main elastic recover …` shares the work among "
        "processes or machines.",
        is_prepared=True,
        is_loaded=True,
    )
    add = parser.add_argument
    add(
        "--table",
        choices=("searched", "uniform"),
        help="widths to learn for (default: searched, if the model has them)",
    )
    add("--levels", type=_levels, metavar="L,…", help="levels, as 0.6,0.3 (default: all below 1)")
    add("--rank", type=_rank, default=_RANK, help="rank of the adapters (default %(default)s)")
    add_text_option(parser)
    add(
        "--tokens",
        type=at_least(_LEAST_TOKENS),
        metavar="N",
        help=f"tokens to learn from at each level (default {_N_TOKENS:,})",
    )
    add("--quick", action="store_true", help=f"learn from {_N_QUICK:,} tokens at each level")
    add(
        "--loss",
        choices=("kl", "next-token"),
        default="kl",
        help="kl: the whole model's predictions are the target; next-token: the text is, as in "
        "ElastiLM (default %(default)s)",
    )
    add(
        "--by-layers",
        action="store_true",
        help="keep only one layer of the weights in memory as float32, which is slower (default: "
        "if all weights would take more than half of the available memory)",
    )
    add("--json", action="store_true", help="print JSON")


def recover(args: argparse.Namespace) -> int:
    """Learn adapters and write them into the prepared file."""
    require_torch("learning adapters")
    from llmaas_plugins.training.workers import workers

    prepared = _prepared(args)
    levels = _chosen(args, prepared.elastic)
    folder = args.model.with_name(f"{args.model.name}.recovery")
    then = f"progress is kept in {folder}; the same command goes on"
    if prepared.stamp is not None:  # the file is written anew, with its adapters
        check_room("recovery", prepared.stamp.n_bytes, folder)
    with (
        stoppable(then),
        workers() as group,
        progress_folder(folder) if group.is_first else contextlib.nullcontext(),
    ):
        job = _job(args, prepared, group, folder)
        kept = {level: _kept(job, level) for level in levels}
        found = {level: _learned(job, level, kept[level]) for level in levels}
        if group.is_first:
            _write(args.model, job, found)
            text = [] if args.text else [own_text_path(folder, _n_text(job.recipe.n_tokens))]
            remove_progress(folder, [one.path for one in kept.values()], text)
            print_report(args, _report(job, found), _lines(job, found))
    return 0


# -- internals -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The prepared file as it is when the command starts.

    Attributes:
        stamp: State of the file.
        elastic: Metadata of the file.
        table: Name of the table of widths.
        older: Adapters of the table; None if they cannot be used.
    """

    stamp: FileStamp | None
    elastic: Elastic
    table: str
    older: LevelAdapters | None


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that learning needs.

    Attributes:
        args: Arguments of the command.
        prepared: The prepared file.
        teacher: The whole model.
        texts: Text to learn from and to judge by.
        recipe: How to learn.
        workers: Processes that learn together.
        folder: Folder for progress.
    """

    args: argparse.Namespace
    prepared: _Prepared
    teacher: Teacher
    texts: Texts
    recipe: Recipe
    workers: Workers
    folder: Path

    def level(self, level: float) -> Level:
        """Return a level with an adapter that changes nothing yet."""
        from llmaas_plugins.training.student import Level

        widths, recipe = self.widths(level), self.recipe
        return Level(self.teacher, widths, recipe.rank, recipe.seed, self.biases(level))

    def older(self, level: float) -> Level | None:
        """Return a level with the adapter that it has in the file, if it has one."""
        found = (self.prepared.older or {}).get(self.prepared.elastic.levels.index(level))
        if not found:
            return None
        older = self.level(level)
        older.put(found)
        return older

    def widths(self, level: float) -> Widths:
        """Return the widths of a level."""
        elastic = self.prepared.elastic
        return elastic.tables[self.prepared.table][elastic.levels.index(level)]

    def biases(self, level: float) -> dict[str, NDArray[np.float32]]:
        """Return the biases of a level by weight name."""
        elastic = self.prepared.elastic
        index = elastic.levels.index(level)
        return {n: bias[index] for n, bias in elastic.biases_of(self.prepared.table).items()}


def _prepared(args: argparse.Namespace) -> _Prepared:
    """Return the prepared file with the table to learn for."""
    from llmaas_plugins.elastic.adapters import read_adapters
    from llmaas_plugins.elastic.metadata import read_elastic

    stamp = FileStamp.at(args.model)
    elastic = read_elastic(args.model)
    if elastic is None:
        raise ConfigError(
            f"{args.model} is not prepared; `llmaas elastic prepare {args.model}` writes a "
            "prepared copy."
        )
    table = args.table or ("searched" if "searched" in elastic.tables else "uniform")
    if table not in elastic.tables:
        raise ConfigError(
            f"{args.model} has no table {table!r}, expected one of {', '.join(elastic.tables)}."
        )
    try:
        older: LevelAdapters | None = read_adapters(args.model, elastic, table)
    except (ConfigError, StoreError):
        older = None
    return _Prepared(stamp, elastic, table, older)


def _chosen(args: argparse.Namespace, elastic: Elastic) -> list[float]:
    known = [level for level in elastic.levels if level < 1]
    unknown = [level for level in args.levels or () if level not in known]
    if unknown:
        raise ConfigError(
            f"{args.model} has no level {unknown[0]} below 1, expected some of "
            f"{', '.join(map(str, known))}."
        )
    return [level for level in known if args.levels is None or level in args.levels]


def _job(args: argparse.Namespace, prepared: _Prepared, group: Workers, folder: Path) -> _Job:
    """Read the text and the weights, and say what learning will cost."""
    from llmaas_plugins.training.costs import memory_bytes, weights_bytes
    from llmaas_plugins.training.device import device_name, free_bytes, learning_device
    from llmaas_plugins.training.recovery import Recipe, split
    from llmaas_plugins.training.student import Teacher

    if prepared.older is None and group.is_first:
        _log.warning(
            "the adapters of %s for the table %r are damaged or were learned for other widths; "
            "this command replaces them.", args.model, prepared.table,
        )  # fmt: skip
    n_tokens = args.tokens or (_N_QUICK if args.quick else _N_TOKENS)
    n_rows = max(1 if args.quick else 2, group.n)
    recipe = Recipe(n_tokens, args.rank, args.loss, n_rows)
    windows = learning_windows(args, _n_text(n_tokens), folder) if group.is_first else None
    texts = split(group.shared(windows))
    device = learning_device()
    is_kept = not args.by_layers and 2 * weights_bytes(args.model) <= free_bytes(device)
    teacher = Teacher(args.model, is_kept=is_kept)
    job = _Job(args, prepared, teacher, texts, recipe, group, folder)
    memory = memory_bytes(args.model, teacher, recipe, texts.training.shape[1])
    _say(job, f"device: {device_name(device)}")
    _say(job, f"memory: about {size_text(memory)}{'' if is_kept else ', one layer at a time'}")
    _say_time(job)
    return job


def _n_text(n_tokens: int) -> int:
    """Return the tokens of the text for a level that learns from so many."""
    from llmaas_plugins.training.recovery import text_tokens

    return text_tokens(n_tokens, _WINDOW)


def _say(job: _Job, text: str) -> None:
    if job.workers.is_first and not job.args.json:
        print(text, flush=True)


def _say_time(job: _Job) -> None:
    """Print how long learning will take, measured at the widest and the narrowest level."""
    from llmaas_plugins.training.costs import level_seconds

    levels = _chosen(job.args, job.prepared.elastic)
    ends = [
        level_seconds(job.level(level), job.texts, job.recipe)
        for level in dict.fromkeys((levels[0], levels[-1]))
    ]
    total_s = len(levels) * sum(ends) / len(ends) / job.workers.n
    n_tokens = job.recipe.n_trained(job.texts.training.shape[1])
    what = f"{counted(len(levels), 'level')} of {n_tokens:,} tokens"
    _say(job, f"time: about {duration_text(total_s)} for {what}")


def _kept(job: _Job, level: float) -> Kept:
    """Return where the learning of a level is kept."""
    from llmaas_plugins.training.recovery import run_identity
    from llmaas_plugins.training.trainer import Kept

    identity = run_identity(
        job.args.model, job.widths(level), job.texts, job.recipe, job.biases(level)
    )
    return Kept(job.folder / f"{level}-{identity[:16]}.npz", identity)


def _learned(job: _Job, level: float, kept: Kept) -> Outcome:
    """Learn the adapter of a level, or finish learning it."""
    from llmaas_plugins.training.recovery import recover

    n_tokens = job.recipe.n_trained(job.texts.training.shape[1])
    with progress_bar(f"level {level}", "token", n_tokens) as bar:
        return recover(
            job.level(level),
            job.texts,
            job.recipe,
            older=job.older(level),
            workers=job.workers,
            kept=kept,
            progress=bar.update if job.workers.is_first else lambda _n: None,
        )


def _write(path: Path, job: _Job, found: Mapping[float, Outcome]) -> None:
    """Write the adapters that improve their levels; the table's other adapters stay."""
    from llmaas_plugins.elastic.adapters import write_adapters
    from llmaas_plugins.training.recovery import padded

    prepared, elastic = job.prepared, job.prepared.elastic
    better = {elastic.levels.index(x): one.adapters for x, one in found.items() if one.is_better}
    if better or prepared.older is None:
        others = {
            index: {name: padded(one, elastic.blocks, name) for name, one in weights.items()}
            for index, weights in (prepared.older or {}).items()
        }
        n_bytes = prepared.stamp.n_bytes if prepared.stamp else 0
        with progress_bar("writing", "B", n_bytes) as bar:
            for n in write_adapters(path, prepared.table, {**others, **better}, prepared.stamp):
                bar.update(n)


def _report(job: _Job, found: Mapping[float, Outcome]) -> dict[str, Any]:
    recipe = job.recipe
    return {
        "table": job.prepared.table,
        "rank": recipe.rank,
        "loss": recipe.loss,
        "n_tokens": recipe.n_tokens,
        "n_held_out": int(job.texts.held_out.size),
        "levels": [
            {
                "level": level,
                "kl_before": one.before.kl,
                "kl": one.after.kl,
                "kl_older": None if one.older is None else one.older.kl,
                "perplexity_before": math.exp(one.before.loss),
                "perplexity": math.exp(one.after.loss),
                "perplexity_whole": math.exp(one.after.whole),
                "closure": one.closure,
                "is_written": one.is_better,
            }
            for level, one in found.items()
        ],
    }


def _lines(job: _Job, found: Mapping[float, Outcome]) -> Iterator[str]:
    yield "level   KL before → after   perplexity before → after (whole)   won back"
    for level, one in found.items():
        before, after, whole = (
            math.exp(loss) for loss in (one.before.loss, one.after.loss, one.after.whole)
        )
        closure = "no gap" if one.closure is None else f"{one.closure:.1%}"
        yield (
            f"{level:5.1f}   {one.before.kl:9.4f} → {one.after.kl:.4f}   "
            f"{before:17.3f} → {after:.3f} ({whole:.3f})   {closure:>8}"
            f"{_left_out(one)}"
        )
    n = sum(one.is_better for one in found.values())
    where = f"of the table {job.prepared.table!r}"
    yield f"{job.args.model}: adapters of {counted(n, 'level')} {where} written"


def _left_out(one: Outcome) -> str:
    if one.is_better:
        return ""
    return f"   not written: no better{'' if one.older is None else '; its older adapter stays'}"


def _levels(text: str) -> Sequence[float]:
    try:
        levels = tuple(float(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or not all(0 < level <= 1 for level in levels):
        raise argparse.ArgumentTypeError(f"expected levels as 0.6,0.3, found {text!r}")
    return levels


def _rank(text: str) -> int:
    rank = at_least(1)(text)
    if rank > _MOST_RANK:
        raise argparse.ArgumentTypeError(f"expected a rank of at most {_MOST_RANK}, found {rank}")
    return rank
