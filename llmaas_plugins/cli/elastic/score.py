"""``llmaas elastic score``: importance of a model's parts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.files import check_target, content_of
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action, evaluator_of
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.model.loading import loaded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_hooks import Tokens
    from llmaas_plugins.elastic.units import Blocks, Scores
    from llmaas_plugins.model.forward import Evaluator

__all__ = [
    "add_calibration_options",
    "add_score",
    "calibration_text",
    "check_text",
    "keep",
    "score",
    "scored",
    "source_blocks",
]

_N_TOKENS, _N_LOSS_TOKENS = 8192, 1024
_LEAST_TOKENS, _LEAST_TEXT = 32, 16
"""Fewest tokens to ask for, and fewest to accept: text from the model may end early."""
_SEED = 0


def add_score(actions: Any) -> None:
    """Register ``score``."""
    parser = add_model_action(
        actions,
        "score",
        score,
        "measure how much each head, neuron and layer of a model matters",
        "Measure how much a model's groups of query heads, neurons and layers matter, and write "
        "these scores to MODEL.scores.npz beside it, or to --output. Scores come from gradients if "
        "torch is installed (`pip install 'llmaas-plugins[train]'`), otherwise from the "
        "fluctuation of values.",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="output (default: MODEL.scores.npz)"
    )
    add_calibration_options(parser)


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for calibration text."""
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text for calibration (default: text that the model writes itself)",
    )
    parser.add_argument(
        "--tokens",
        type=_n_tokens,
        metavar="N",
        help=f"tokens of this text to use, {_LEAST_TOKENS} or more (default {_N_TOKENS}); "
        "whole windows of 512 are used",
    )


def score(args: argparse.Namespace) -> int:
    """Compute a model's scores and write them."""
    from llmaas_plugins.elastic.prepared_file import check_is_another
    from llmaas_plugins.elastic.scores import scores_path

    blocks, path = source_blocks(args.model), args.output or scores_path(args.model)
    check_target(path, "-o")
    check_is_another(args.model, path)
    with stoppable("nothing was written"):
        keep(args, path, scored(args, blocks))
    return 0


def scored(args: argparse.Namespace, blocks: Blocks) -> Scores:
    """Compute the scores of a model, by gradients if possible."""
    n_tokens = args.tokens or _N_TOKENS
    windows, scores = _fluctuations(args, blocks, n_tokens)
    try:
        by_gradients = _gradients(args.model, windows)
    except (ImportError, ConfigError) as error:
        print(f"no gradients ({error}): scores come from fluctuation.")
    else:
        scores = replace(by_gradients, layers=scores.layers)
    return scores


def keep(args: argparse.Namespace, path: Path, scores: Scores) -> None:
    """Write a model's scores, and print a summary.

    Raises:
        StoreError: The scores cannot be written.
    """
    from llmaas_plugins.elastic.scores import write_scores

    write_scores(path, scores, args.model)
    found = scores.calibration
    said = args.text or "the model's own text"
    print(f"{path}: scores by {found.method} on {found.n_tokens:,} tokens of {said}.")


def check_text(args: argparse.Namespace) -> None:
    """Check that a text is long enough, before anything takes minutes.

    Raises:
        ConfigError: The text is too short, or cannot be read.
    """
    if args.text is not None:
        with loaded(args.model, is_vocab_only=True) as model:
            _tokens(args.text, model)


def calibration_text(path: Path | None, model: Any, evaluator: Evaluator, n_tokens: int) -> Tokens:
    """Return a text's tokens, or as many tokens that the model writes itself.

    Raises:
        ConfigError: The text cannot be read, or is too short.
    """
    if path is not None:
        return _tokens(path, model)
    with progress_bar("text", "token", n_tokens) as bar:
        text = evaluator.say(n_tokens, _SEED, bar.update)
    return _long_enough(text, "the model wrote", "Give it a text with `--text FILE`.")


def source_blocks(model: Path) -> Blocks:
    """Return the blocks of a model that is not prepared yet."""
    from llmaas_plugins.elastic.metadata import PREFIX
    from llmaas_plugins.elastic.units import blocks_in
    from llmaas_plugins.model.gguf_header import read_header

    header = read_header(model)
    if PREFIX in header.fields:
        raise ConfigError(
            f"{model} is prepared already. `llmaas elastic restore` writes its source."
        )
    return blocks_in(header, model)


# -- internals -----------------------------------------------------------------------------------


def _fluctuations(
    args: argparse.Namespace, blocks: Blocks, n_tokens: int
) -> tuple[NDArray[np.int32], Scores]:
    """Compute scores from fluctuation and losses of layers, which need the engine alone.

    Return them after the text's windows.
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
    with evaluator_of(args.model, prober=prober, watcher=watcher) as (model, evaluator):
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


def _tokens(path: Path, model: Any) -> Tokens:
    """Return a text's tokens."""
    import numpy as np

    text = np.array(model.tokenize(content_of(path), False, False), np.int32)
    return _long_enough(text, f"{path} has", "Give a longer text.")


def _long_enough(text: Tokens, whose: str, then: str) -> Tokens:
    if len(text) < _LEAST_TEXT:
        raise ConfigError(
            f"{whose} {len(text)} tokens, expected at least {_LEAST_TEXT} to compute scores. {then}"
        )
    return text


def _n_tokens(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < _LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"expected {_LEAST_TOKENS} or more, found {text!r}")
    return int(text)
