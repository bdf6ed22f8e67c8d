"""``llmaas elastic score``: what matters in a model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.offline import content_of, evaluating, stoppable
from llmaas_plugins.cli.output import progress_bar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_hooks import Tokens
    from llmaas_plugins.elastic.units import Blocks, Scores
    from llmaas_plugins.evaluating import Evaluator

__all__ = ["add_calibration_options", "calibration_text", "score", "scored"]

_N_TOKENS, _N_LOSS_TOKENS = 8192, 1024
_SEED = 0


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    """What to see with what matters."""
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to see with what matters (default: what the model says)",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        metavar="N",
        help=f"of it (default {_N_TOKENS}); whole windows of 512",
    )


def score(args: argparse.Namespace) -> int:
    """Find a model's scores, and write them beside it."""
    from llmaas_plugins.elastic.units import blocks_of

    with stoppable("nothing was written"):
        scored(args, blocks_of(args.model))
    return 0


def scored(args: argparse.Namespace, blocks: Blocks) -> Scores:
    """Scores of a model, which are written beside it: by gradients where that is possible."""
    from llmaas_plugins.elastic.scores import scores_path, write_scores

    n_tokens = args.tokens or _N_TOKENS
    windows, scores = _fluctuations(args, blocks, n_tokens)
    try:
        by_gradients = _gradients(args.model, windows)
    except (ImportError, ConfigError) as error:
        print(f"no gradients: {error}")
    else:
        scores = replace(by_gradients, layers=scores.layers)
    path = scores_path(args.model)
    write_scores(path, scores, args.model)
    found = scores.calibration
    said = args.text or "what the model says"
    print(f"{path}: importance by {found.method}, {found.n_tokens:,} tokens of {said}.")
    return scores


def calibration_text(path: Path | None, model: Any, evaluator: Evaluator, n_tokens: int) -> Tokens:
    """A text's tokens, or so many that the model says itself.

    Raises:
        ConfigError: The text cannot be read, or is empty.
    """
    import numpy as np

    if path is None:
        with progress_bar("text", "token", n_tokens) as bar:
            return evaluator.say(n_tokens, _SEED, bar.update)
    text = np.array(model.tokenize(content_of(path), False, False), np.int32)
    if len(text) < 2:
        raise ConfigError(f"there is nothing in {path} to see with what matters")
    return text


# -- inside --------------------------------------------------------------------------------------


def _fluctuations(
    args: argparse.Namespace, blocks: Blocks, n_tokens: int
) -> tuple[NDArray[np.int32], Scores]:
    """What the engine alone can tell: scores without gradients, and losses of layers.

    With them the text, in windows.
    """
    from llmaas_plugins.elastic.fluctuation import (
        METHOD,
        Watcher,
        calibration_of,
        fluctuation_scores,
    )
    from llmaas_plugins.elastic.layer_losses import layer_losses
    from llmaas_plugins.elastic.probing import Prober

    prober, watcher = Prober(blocks), Watcher(blocks)
    with evaluating(args.model, prober=prober, watcher=watcher) as (model, evaluator):
        text = calibration_text(args.text, model, evaluator, n_tokens)
        windows = evaluator.windows(text, n_tokens)
        n_loss = min(n_tokens, _N_LOSS_TOKENS)
        with progress_bar("units", "token", n_tokens) as bar:
            moments = watcher.moments(evaluator, text, n_tokens, bar.update)
        with progress_bar("layers", "token", n_loss * (blocks.n_layers + 1)) as bar:
            losses = layer_losses(prober, evaluator, blocks, text, n_loss, progress=bar.update)
    calibration = calibration_of(windows.ravel(), _SEED, windows.size, METHOD)
    scores = fluctuation_scores(args.model, blocks, moments, calibration)
    return windows, replace(scores, layers=losses)


def _gradients(model: Path, windows: NDArray[np.int32]) -> Scores:
    from llmaas_plugins.elastic.gradients import gradient_scores

    with progress_bar("gradients", "%", 100) as bar:
        return gradient_scores(
            model, windows, seed=_SEED, progress=lambda share: bar.update(100 * share - bar.n)
        )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number
