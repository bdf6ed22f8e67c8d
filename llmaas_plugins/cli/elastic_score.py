"""``llmaas elastic score``: what matters in a model."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.ending import stoppable
from llmaas_plugins.cli.offline import (
    check_target,
    content_of,
    evaluating,
    loaded,
)
from llmaas_plugins.cli.output import progress_bar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_hooks import Tokens
    from llmaas_plugins.elastic.units import Blocks, Scores
    from llmaas_plugins.evaluating import Evaluator

__all__ = [
    "add_calibration_options",
    "add_score_options",
    "calibration_text",
    "check_text",
    "keep",
    "score",
    "scored",
    "source_blocks",
]

_N_TOKENS, _N_LOSS_TOKENS = 8192, 1024
_LEAST_TOKENS, _LEAST_TEXT = 32, 16
"""To ask for, and to have: what the model says may end early."""
_SEED = 0


def add_score_options(parser: argparse.ArgumentParser) -> None:
    """Those of ``score``."""
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: MODEL.scores.npz"
    )
    add_calibration_options(parser)


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
        type=_n_tokens,
        metavar="N",
        help=f"of it, {_LEAST_TOKENS} or more (default {_N_TOKENS}); whole windows of 512",
    )


def score(args: argparse.Namespace) -> int:
    """Find a model's scores, and write them."""
    from llmaas_plugins.elastic.prepared_file import check_is_another
    from llmaas_plugins.elastic.scores import scores_path

    blocks, path = source_blocks(args.model), args.output or scores_path(args.model)
    check_target(path, "-o")
    check_is_another(args.model, path)
    with stoppable("nothing was written"):
        keep(args, path, scored(args, blocks))
    return 0


def scored(args: argparse.Namespace, blocks: Blocks) -> Scores:
    """Scores of a model: by gradients where that is possible."""
    n_tokens = args.tokens or _N_TOKENS
    windows, scores = _fluctuations(args, blocks, n_tokens)
    try:
        by_gradients = _gradients(args.model, windows)
    except (ImportError, ConfigError) as error:
        print(f"no gradients ({error}): what matters is what fluctuates.")
    else:
        scores = replace(by_gradients, layers=scores.layers)
    return scores


def keep(args: argparse.Namespace, path: Path, scores: Scores) -> None:
    """Write a model's scores, and say what they are.

    Raises:
        StoreError: They cannot be written.
    """
    from llmaas_plugins.elastic.scores import write_scores

    write_scores(path, scores, args.model)
    found = scores.calibration
    said = args.text or "what the model says"
    print(f"{path}: importance by {found.method}, {found.n_tokens:,} tokens of {said}.")


def check_text(args: argparse.Namespace) -> None:
    """See that a text is long enough, before anything takes minutes.

    Raises:
        ConfigError: It is not, or cannot be read.
    """
    if args.text is not None:
        with loaded(args.model, is_vocab_only=True) as model:
            _tokens(args.text, model)


def calibration_text(path: Path | None, model: Any, evaluator: Evaluator, n_tokens: int) -> Tokens:
    """A text's tokens, or so many that the model says itself.

    Raises:
        ConfigError: The text cannot be read, or either is too short.
    """
    if path is not None:
        return _tokens(path, model)
    with progress_bar("text", "token", n_tokens) as bar:
        text = evaluator.say(n_tokens, _SEED, bar.update)
    return _long_enough(text, "the model says", "Give it a text with `--text FILE`.")


def source_blocks(model: Path) -> Blocks:
    """Of a model that is not prepared yet."""
    from llmaas_plugins.elastic.metadata import PREFIX
    from llmaas_plugins.elastic.units import blocks_in
    from llmaas_plugins.gguf_header import read_header

    header = read_header(model)
    if PREFIX in header.fields:
        raise ConfigError(
            f"{model} is prepared already. `llmaas elastic restore` makes its source of it."
        )
    return blocks_in(header, model)


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


def _tokens(path: Path, model: Any) -> Tokens:
    """A text's."""
    import numpy as np

    text = np.array(model.tokenize(content_of(path), False, False), np.int32)
    return _long_enough(text, f"{path} has", "Give a longer text.")


def _long_enough(text: Tokens, whose: str, then: str) -> Tokens:
    if len(text) < _LEAST_TEXT:
        raise ConfigError(
            f"{whose} {len(text)} tokens, expected {_LEAST_TEXT} or more to see with what matters. "
            f"{then}"
        )
    return text


def _n_tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < _LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"expected {_LEAST_TOKENS} or more, found {text!r}")
    return int(text)
