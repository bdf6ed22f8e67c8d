"""``llmaas flash distill``: a channel file whose matrices lose less in the sparse mode."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, StoreError, TensorInfo
from llmaas_plugins.cli.files import check_room, check_target
from llmaas_plugins.cli.flash.distill_report import lines_of, report_of
from llmaas_plugins.cli.flash.pack import tensors_of
from llmaas_plugins.cli.flash.plan import channel_contents
from llmaas_plugins.cli.flash.sharing import (
    kept_steps,
    packaged_windows,
    share_rows,
    shares_of,
    shares_on,
    shares_path,
    steps_of,
)
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.learning_text import (
    add_text_option,
    learning_windows,
    own_text_path,
)
from llmaas_plugins.cli.models import add_model_action, evaluator_of
from llmaas_plugins.cli.options import at_least, require_torch
from llmaas_plugins.cli.output import duration_text, print_report, progress_bar, size_text
from llmaas_plugins.cli.progress_folder import progress_folder, remove_progress
from llmaas_plugins.files.file_bytes import as_store_error, sync_directory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_hooks import Tokens
    from llmaas_plugins.flash_weights.channels import ChannelFile
    from llmaas_plugins.flash_weights.operands import Operand
    from llmaas_plugins.flash_weights.shares import Shares
    from llmaas_plugins.training.distillation import SparseRecipe
    from llmaas_plugins.training.recovery import Texts
    from llmaas_plugins.training.sparse_student import SparseStudent
    from llmaas_plugins.training.workers import Workers

__all__ = ["add_distill"]

_N_TOKENS, _N_QUICK = 1_048_576, 32_768
_N_OWN_TEXT = 262_144
"""Most tokens that the model writes to learn from; they are used several times."""
_LEAST_TOKENS, _WINDOW = 2_048, 512
_MOST_SPARSITY = 0.95
_KEPT_BYTES = 12
"""Bytes of a weight in a checkpoint: its value and the optimizer's two moments."""


def add_distill(actions: Any) -> None:
    """Register ``distill``."""
    parser = add_model_action(
        actions,
        "distill",
        distill,
        "write a channel file whose sparse tokens lose less",
        "Train the matrices of the channel file so that sparse tokens predict what the whole model "
        "predicts, and write them to MODEL.channels. Prompts and the exact mode do not use that "
        "file, so they stay as they are. Needs torch: pip install 'llmaas-plugins[train]'; it uses "
        "a GPU that torch can use, unless CUDA_VISIBLE_DEVICES is empty. Stop it at any time: the "
        "same command goes on. `torchrun --nproc-per-node N -m "
        "llmaas_plugins.cli.main flash distill …` shares the work among processes or machines.",
        is_loaded=True,
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="output (default: MODEL.channels)")
    add_text_option(parser)
    add(
        "--tokens",
        type=at_least(_LEAST_TOKENS),
        metavar="N",
        help=f"tokens to learn from (default {_N_TOKENS:,}); a shorter text is used several times",
    )
    add("--quick", action="store_true", help=f"learn from {_N_QUICK:,} tokens")
    add(
        "--sparsity",
        type=_sparsity,
        metavar="F",
        help="train at this sparsity only, as ActiveFlow does (default: drawn for each step "
        "between 0.4 and 0.8)",
    )
    add("--json", action="store_true", help="print JSON")


def distill(args: argparse.Namespace) -> int:
    """Distill a model's channel file."""
    require_torch("distillation")
    from llmaas_plugins.flash_weights.channels import channel_path
    from llmaas_plugins.training.workers import workers

    tensors, path = tensors_of(args.model), args.output or channel_path(args.model)
    check_target(path, "-o")
    if path.exists() and path.samefile(args.model):
        raise ConfigError(f"{path} is the model itself. Choose another place with `-o FILE`.")
    folder = path.with_name(f"{path.name}.distill")
    then = f"progress is kept in {folder}; the same command goes on"
    with (
        stoppable(then),
        workers() as group,
        progress_folder(folder) if group.is_first else contextlib.nullcontext(),
    ):
        job = _job(args, tensors, group, folder)
        _run(job, path)
    return 0


# -- internals -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that distillation needs.

    Attributes:
        args: Arguments of the command.
        tensors: Tensors of the model.
        shares: Share of each operand's values that the student leaves out.
        student: The student.
        texts: Text to learn from and to judge by.
        recipe: How to learn.
        workers: Processes that learn together.
        folder: Folder for progress.
        shared: Files of progress that other runs may use, too.
    """

    args: argparse.Namespace
    tensors: Mapping[str, TensorInfo]
    shares: Shares
    student: SparseStudent
    texts: Texts
    recipe: SparseRecipe
    workers: Workers
    folder: Path
    shared: Sequence[Path]

    def bar(self, what: str, n_tokens: int) -> Any:
        """Return a progress bar of tokens."""
        return progress_bar(what, "token", n_tokens)


def _run(job: _Job, path: Path) -> None:
    """Judge the student, train it, write the file if it is better, and print the report."""
    from llmaas_plugins.training.distillation import is_better, read_channels

    before = _judged(job, "judging before")
    kept = _train(job)
    if not job.workers.is_first:
        return
    made = job.folder / "distilled.channels"
    file = _write(job, made)
    read_channels(job.student, file)
    after = _judged(job, "judging after")
    is_written = is_better(before, after)
    older = _judged_older(job, path) if is_written else None
    if older is not None:
        is_written = is_better(older, after)
    if is_written:
        with as_store_error(f"cannot write {path}"):
            made.replace(path)
            sync_directory(path.parent)
    remove_progress(job.folder, (kept, made), job.shared)
    report = report_of(job.recipe, job.texts, before, after, path if is_written else None)
    print_report(job.args, report, lines_of(report))


def _job(
    args: argparse.Namespace, tensors: Mapping[str, TensorInfo], group: Workers, folder: Path
) -> _Job:
    """Say what distillation will cost, and read the text and the weights."""
    from llmaas_plugins.flash_weights.channel_layout import channel_operands
    from llmaas_plugins.training.distillation import N_PROMPT, SparseRecipe
    from llmaas_plugins.training.recovery import split, text_tokens
    from llmaas_plugins.training.sparse_student import MaskedTeacher, SparseStudent, grids_in

    operands = channel_operands(tensors)
    if not operands:
        raise ConfigError(f"{args.model} has no matrices whose channels could be left out.")
    n_tokens = args.tokens or (_N_QUICK if args.quick else _N_TOKENS)
    recipe = SparseRecipe(n_tokens, args.sparsity, n_rows=max(2, group.n))
    is_kept = _checked_memory(args, operands, tensors, recipe, group)
    learned = [tensors[name] for operand in operands for name in operand.weights]
    check_room("distillation", _kept_bytes(learned), folder)
    n_text = text_tokens(n_tokens if args.text else min(n_tokens, _N_OWN_TEXT), _WINDOW)
    windows = learning_windows(args, n_text, folder) if group.is_first else None
    texts = split(group.shared(windows))
    n_prompt = min(N_PROMPT, texts.training.shape[1] // 4)
    recipe = SparseRecipe(n_tokens, args.sparsity, n_prompt, n_rows=recipe.n_rows)
    teacher = MaskedTeacher(args.model, is_kept=is_kept)
    rows = share_rows(texts.training, is_own=not args.text)
    kept_shares = shares_path(folder, rows)
    steps = None
    if group.is_first:  # its shares serve all
        steps = _share_steps(
            args,
            rows,
            kept_shares,
            len(operands),
            lambda windows: steps_of(shares_on(teacher, windows, operands, tensors)),
        )
    shares = dict(zip(operands, shares_of(group.shared(steps)), strict=True))
    teacher.share_by(shares)
    student = SparseStudent(teacher, grids_in(args.model, operands, tensors))
    shared = [kept_shares] if args.text else [kept_shares, own_text_path(folder, n_text)]
    job = _Job(args, tensors, shares, student, texts, recipe, group, folder, shared)
    _say_time(job)
    return job


def _share_steps(
    args: argparse.Namespace,
    rows: list[Tokens],
    path: Path,
    n_operands: int,
    measure: Callable[[list[Tokens]], NDArray[np.int32]],
) -> NDArray[np.int32]:
    """Measure each operand's share on some of the text.

    They are kept in ``path``: on another device, a run could measure others and begin anew.
    """
    from llmaas_plugins.elastic.calibration import packaged_texts
    from llmaas_plugins.flash_weights.model_weights import digest_of

    identity = {
        "model": digest_of(args.model),
        "text": [row.tolist() for row in rows],
        "packaged": {} if args.text else dict(packaged_texts()),
    }

    def measured() -> NDArray[np.int32]:
        if args.text:
            return measure(rows)
        with evaluator_of(args.model) as (model, evaluator):
            packaged = packaged_windows(model, evaluator)
        return measure([*rows, *packaged])

    return kept_steps(path, identity, n_operands, measured)


def _checked_memory(
    args: argparse.Namespace,
    operands: list[Operand],
    tensors: Mapping[str, TensorInfo],
    recipe: SparseRecipe,
    group: Workers,
) -> bool:
    """Print the memory that is needed; return whether the whole model's weights stay in memory.

    Raises:
        ConfigError: More is needed than is available.
    """
    from llmaas_plugins.elastic.torch_model import Decoder
    from llmaas_plugins.training.costs import weights_bytes
    from llmaas_plugins.training.device import device_name, free_bytes, learning_device
    from llmaas_plugins.training.distillation_costs import distillation_bytes

    decoder, whole = Decoder(args.model), weights_bytes(args.model)
    names = [name for operand in operands for name in operand.weights]
    n_own = sum(tensors[name].shape[0] * tensors[name].shape[1] for name in names)
    device = learning_device()
    available = free_bytes(device)
    needed = {
        is_kept: distillation_bytes(
            whole, decoder.blocks, n_own, decoder.n_vocab, recipe, _WINDOW, is_kept=is_kept
        )
        for is_kept in (True, False)
    }
    is_kept = needed[True] <= available
    if needed[is_kept] > available:
        raise ConfigError(
            f"distillation of {args.model} needs about {size_text(needed[False])} of memory, but "
            f"{size_text(available)} are available on {device_name(device)}. Run it on a machine "
            "with more memory, and copy the channel file. CUDA_VISIBLE_DEVICES= turns a GPU off "
            "whose machine has more."
        )
    if group.is_first and not args.json:
        how = "" if is_kept else ", one layer of the whole model at a time"
        print(f"device: {device_name(device)}", flush=True)
        print(f"memory: about {size_text(needed[is_kept])}{how}", flush=True)
    return is_kept


def _kept_bytes(learned: Sequence[TensorInfo]) -> int:
    """Return the room on disk for the checkpoint, for its successor and for the new file."""
    n_own = sum(info.shape[0] * info.shape[1] for info in learned)
    return 2 * _KEPT_BYTES * n_own + sum(info.n_bytes for info in learned)


def _say_time(job: _Job) -> None:
    from llmaas_plugins.training.distillation_costs import distillation_seconds

    texts, recipe = job.texts, job.recipe
    seconds = distillation_seconds(job.student, texts.training, len(texts.held_out), recipe)
    if job.workers.is_first and not job.args.json:
        time = duration_text(seconds / job.workers.n)
        print(f"time: about {time} for {_trained_tokens(job):,} tokens", flush=True)


def _trained_tokens(job: _Job) -> int:
    return job.recipe.n_trained(job.texts.training.shape[1])


def _judged(job: _Job, what: str) -> Any:
    """Return the quality of each window held out; of none in other processes than the first."""
    from llmaas_plugins.training.distillation import judge

    if not job.workers.is_first:
        return {}
    windows, recipe = job.texts.held_out, job.recipe
    with job.bar(what, len(recipe.judged) * windows.size) as bar:
        return judge(job.student, windows, recipe.n_prompt, recipe.judged, bar.update)


def _judged_older(job: _Job, path: Path) -> Any:
    """Return the quality of an older distilled file; None if there is none that can be used."""
    from llmaas_plugins.flash_weights.channels import open_channels
    from llmaas_plugins.training.distillation import read_channels

    try:
        file = open_channels(path, job.args.model, job.tensors)
        if file.distilled is None:
            return None
        read_channels(job.student, file)
    except (ConfigError, StoreError):
        return None
    return _judged(job, "judging the older file")


def _train(job: _Job) -> Path:
    """Train the student, and return the path of the checkpoint."""
    from llmaas_plugins.flash_weights.model_weights import digest_of
    from llmaas_plugins.training.distillation import distill, run_identity
    from llmaas_plugins.training.trainer import Kept

    windows = job.texts.training
    identity = run_identity(digest_of(job.args.model), windows, job.shares, job.recipe)
    kept = Kept(job.folder / f"{identity[:16]}.npz", identity)
    with job.bar("learning", _trained_tokens(job)) as bar:
        progress: Callable[[int], Any] = bar.update if job.workers.is_first else lambda _n: None
        distill(job.student, windows, job.recipe, workers=job.workers, kept=kept, progress=progress)
    return kept.path


def _write(job: _Job, path: Path) -> ChannelFile:
    """Calibrate the student, and write its channel file."""
    from llmaas_plugins.flash_weights.channels import open_channels, write_channels
    from llmaas_plugins.flash_weights.shares import SPARSITIES
    from llmaas_plugins.training.distillation import calibrate, distillation_of

    windows, n_prompt = job.texts.training, job.recipe.n_prompt
    with job.bar("calibrating", len(SPARSITIES) * windows.shape[1]) as bar:
        found = calibrate(job.student, windows, job.shares, n_prompt, bar.update)
    model, tensors = job.args.model, job.tensors
    contents, _ = channel_contents(model, tensors)
    writing = write_channels(
        model,
        path,
        tensors,
        found,
        group_layers=contents.group_layers if contents else 1,
        distillation=distillation_of(job.student, job.recipe, tensors),
    )
    n_bytes = sum(tensors[name].n_bytes for name in job.student.names)
    with progress_bar("writing", "B", 2 * n_bytes) as bar:  # written, and read back
        for n_done in writing:
            bar.update(n_done)
    return open_channels(path, model, tensors)


def _sparsity(text: str) -> float:
    try:
        sparsity = float(text)
    except ValueError:
        sparsity = -1.0
    if not 0 < sparsity <= _MOST_SPARSITY:
        raise argparse.ArgumentTypeError(
            f"expected a share above 0 and up to {_MOST_SPARSITY}, found {text!r}"
        )
    return sparsity
