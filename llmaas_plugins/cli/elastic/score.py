"""``llmaas elastic score``: importance of a model's parts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.elastic.text import (
    N_TOKENS,
    Text,
    add_calibration_options,
    calibration_text,
    check_calibration,
    n_written_tokens,
    text_digest,
)
from llmaas_plugins.cli.files import check_target
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action, evaluator_of, identified
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.cli.own_text import SEED

if TYPE_CHECKING:
    from llmaas_hooks import Tokens
    from llmaas_plugins.elastic.checkpoint import Checkpoint
    from llmaas_plugins.elastic.units import Blocks, Scores
    from llmaas_plugins.model.forward import Evaluator

__all__ = [
    "CONTINUE",
    "SCORE",
    "WRITE_TEXT",
    "add_score",
    "checkpoint_of",
    "keep",
    "n_scored_tokens",
    "score",
    "scored",
    "source_blocks",
    "written_text",
]

WRITE_TEXT, SCORE = "write text with the model", "score units"
"""Names of steps."""
CONTINUE = "run the same command again to continue"

_N_LOSS_TOKENS = 256
_LOSS_LENGTH = 64
"""Length of the windows on which layers are left out: short ones, from more places."""

Bar = Callable[[str, str, int], Any]
"""Function that returns a progress bar, given its title, its unit and the total."""


def add_score(actions: Any) -> None:
    """Register ``score``."""
    parser = add_model_action(
        actions,
        "score",
        score,
        "measure how much each head, neuron and layer of a model matters",
        "Measure how much a model's groups of query heads, neurons and layers matter, and write "
        "these scores to MODEL.scores.npz beside it, or to --output. Scores come from the "
        "fluctuation of values, or from gradients with --gradients.",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="output (default: MODEL.scores.npz)"
    )
    add_calibration_options(parser)


def score(args: argparse.Namespace) -> int:
    """Compute a model's scores and write them."""
    from llmaas_plugins.elastic.prepared_file import check_is_another
    from llmaas_plugins.elastic.scores import scores_path

    blocks, path = source_blocks(args.model), args.output or scores_path(args.model)
    check_target(path, "-o")
    check_is_another(args.model, path)
    check_calibration(args)
    with stoppable(CONTINUE), checkpoint_of(args, path) as checkpoint:
        text = written_text(args, checkpoint, progress_bar)
        scores = scored(args, blocks, text, checkpoint, progress_bar)
        print(keep(args, path, scores))
    return 0


def checkpoint_of(args: argparse.Namespace, target: Path, **options: object) -> Checkpoint:
    """Open the checkpoint of a file that is being made.

    Args:
        args: Arguments of the command.
        target: The file.
        options: Options that change results, besides those of the calibration.
    """
    from llmaas_plugins.elastic.checkpoint import Checkpoint, checkpoint_path, fingerprint_of

    fingerprint = fingerprint_of(
        {
            "model": identified(args.model),
            "text": text_digest(args),
            "tokens": args.tokens,
            "gradients": args.gradients,
            **options,
        }
    )
    return Checkpoint(checkpoint_path(target), fingerprint)


def written_text(args: argparse.Namespace, checkpoint: Checkpoint, bar: Bar) -> Text:
    """Return the calibration text, some of which the model writes."""
    n_tokens = n_written_tokens(args)
    with (
        evaluator_of(args.model) as (model, evaluator),
        bar(WRITE_TEXT, "token", n_tokens) as shown,
    ):
        return calibration_text(args, model, evaluator, checkpoint, shown.update)


def n_scored_tokens(args: argparse.Namespace, blocks: Blocks) -> int:
    """Return about how many tokens are read to compute scores, not counting gradients."""
    n_tokens = args.tokens or N_TOKENS
    return n_tokens + min(n_tokens, _N_LOSS_TOKENS) * (blocks.n_layers + 1)


def scored(
    args: argparse.Namespace, blocks: Blocks, text: Text, checkpoint: Checkpoint, bar: Bar
) -> Scores:
    """Compute the scores of a model, by gradients if these were requested."""
    from llmaas_plugins.elastic.fluctuation import (
        METHOD,
        Watcher,
        calibration_of,
        fluctuation_scores,
    )
    from llmaas_plugins.elastic.layer_losses import layer_losses
    from llmaas_plugins.elastic.probing import Prober

    prober, watcher = Prober(blocks), Watcher(blocks)
    with evaluator_of(args.model, prober=prober, watcher=watcher) as (_, evaluator):
        n_tokens = args.tokens or N_TOKENS
        windows = list(evaluator.chosen(text.tokens, n_tokens))
        some = _loss_windows(text, evaluator, min(n_tokens, _N_LOSS_TOKENS))
        total = sum(map(len, windows)) + sum(map(len, some)) * (blocks.n_layers + 1)
        with bar(SCORE, "token", total) as shown:
            moments = watcher.moments(evaluator, windows, shown.update, checkpoint)
            losses = layer_losses(
                prober, evaluator, blocks, some, progress=shown.update, checkpoint=checkpoint
            )
        equal = evaluator.windows(text.tokens, n_tokens)
    if args.gradients:
        return replace(_by_gradients(args.model, equal, checkpoint), layers=losses)
    calibration = calibration_of(text.tokens, SEED, sum(map(len, windows)), METHOD)
    return replace(fluctuation_scores(args.model, blocks, moments, calibration), layers=losses)


def keep(args: argparse.Namespace, path: Path, scores: Scores) -> str:
    """Write a model's scores, and return a summary.

    Raises:
        StoreError: The scores cannot be written.
    """
    from llmaas_plugins.elastic.scores import write_scores

    write_scores(path, scores, args.model)
    found = scores.calibration
    said = args.text or "the model's own text and packaged text"
    return f"{path}: scores by {found.method} on {found.n_tokens:,} tokens of {said}."


def source_blocks(model: Path, *, cuts_keys_values: bool = False) -> Blocks:
    """Return the blocks of a model that is not prepared yet."""
    from llmaas_plugins.elastic.metadata import PREFIX
    from llmaas_plugins.elastic.units import blocks_in
    from llmaas_plugins.model.gguf_header import read_header

    header = read_header(model)
    if PREFIX in header.fields:
        raise ConfigError(
            f"{model} is prepared already. `llmaas elastic restore` writes its source."
        )
    return blocks_in(header, model, cuts_keys_values=cuts_keys_values)


# -- internals -----------------------------------------------------------------------------------


def _loss_windows(text: Text, evaluator: Evaluator, n_tokens: int) -> tuple[Tokens, ...]:
    """Return short windows of all texts in turn."""
    from llmaas_plugins.elastic.calibration import parts_of

    texts = [evaluator.cut(one, _LOSS_LENGTH) for one in (text.own, *text.others.values())]
    return parts_of(texts, n_tokens).search


def _by_gradients(model: Path, windows: Any, checkpoint: Checkpoint) -> Scores:
    from llmaas_plugins.elastic.gradients import gradient_scores

    with progress_bar("gradients", "%", 100) as bar:
        return gradient_scores(
            model,
            windows,
            seed=SEED,
            progress=lambda share: bar.update(int(100 * share) - bar.n),
            checkpoint=checkpoint,
        )
