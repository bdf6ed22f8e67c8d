"""Shares of the values that each activation leaves out in the sparse mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, TensorInfo
from llmaas_plugins.cli.models import evaluator_of
from llmaas_plugins.cli.output import progress_bar
from llmaas_plugins.cli.own_text import SEED

if TYPE_CHECKING:
    from llmaas_hooks import Tokens
    from llmaas_plugins.flash_weights.operands import Operand
    from llmaas_plugins.flash_weights.shares import Shares
    from llmaas_plugins.model.forward import Evaluator
    from llmaas_plugins.training.student import Teacher

__all__ = ["N_SHARE_TOKENS", "measured_shares", "shares_on"]

N_SHARE_TOKENS = 2048
"""Tokens with which shares are measured, about."""
_WINDOW = 512


def measured_shares(
    model: Path, operands: Sequence[Operand], tensors: Mapping[str, TensorInfo], text: bytes | None
) -> Shares | None:
    """Return the shares that cost least on a text; None, and say why, if that cannot be measured.

    Args:
        model: Path of the model.
        operands: Operands of the channel file.
        tensors: Tensors of the model.
        text: The text; None for text that the model writes and packaged text of several kinds.
    """
    if find_spec("torch") is None:
        _say_equal("torch is not installed: pip install 'llmaas-plugins[train]'")
        return None
    from llmaas_plugins.training.student import Teacher

    try:
        teacher = Teacher(model, is_kept=False)
    except ConfigError as error:
        _say_equal(str(error))
        return None
    with evaluator_of(model) as (opened, evaluator):
        windows = _windows(opened, evaluator, text)
    return shares_on(teacher, windows, operands, tensors)


def shares_on(
    teacher: Teacher,
    windows: Sequence[Tokens],
    operands: Sequence[Operand],
    tensors: Mapping[str, TensorInfo],
) -> Shares:
    """Return the shares that cost least on some windows of text, and show progress."""
    from llmaas_plugins.flash_weights.shares import cheapest_shares, weight_counts
    from llmaas_plugins.training.loss_growth import loss_growth

    with progress_bar("measuring losses", "%", 100) as bar:
        growth = loss_growth(
            teacher, windows, operands, lambda share: bar.update(int(100 * share) - bar.n)
        )
    return cheapest_shares(growth, weight_counts(operands, tensors))


# -- internals -----------------------------------------------------------------------------------


def _say_equal(reason: str) -> None:
    print(f"The sparse mode leaves out the same share of each activation: {reason}", flush=True)


def _windows(model: Any, evaluator: Evaluator, text: bytes | None) -> list[Tokens]:
    import numpy as np

    from llmaas_plugins.elastic.calibration import packaged_texts

    def tokens(content: bytes) -> Tokens:
        return np.array(model.tokenize(content, False, False), np.int32)

    if text is not None:
        return list(evaluator.chosen(tokens(text), N_SHARE_TOKENS))
    with progress_bar("writing text", "token", n := N_SHARE_TOKENS // 2) as bar:
        own = evaluator.say(n, SEED, bar.update)
    others = [
        tokens(each.encode())[: n // len(packaged_texts())] for each in packaged_texts().values()
    ]
    return [window for each in (own, *others) for window in evaluator.cut(each, _WINDOW)]
