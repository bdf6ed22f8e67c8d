"""Shares of the values that each activation leaves out in the sparse mode."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, TensorInfo
from llmaas_plugins.cli.given_text import packaged_tokens, tokens_of
from llmaas_plugins.cli.models import evaluator_of
from llmaas_plugins.cli.output import progress_bar, size_text
from llmaas_plugins.cli.own_text import SEED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmaas_hooks import Tokens
    from llmaas_plugins.flash_weights.operands import Operand
    from llmaas_plugins.flash_weights.shares import Share, Shares
    from llmaas_plugins.model.forward import Evaluator
    from llmaas_plugins.training.student import Teacher

__all__ = [
    "kept_steps",
    "measured_shares",
    "packaged_windows",
    "share_rows",
    "shares_of",
    "shares_on",
    "shares_path",
    "steps_of",
]

_N_TOKENS = 2048
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
    from llmaas_plugins.training.device import free_bytes, learning_device
    from llmaas_plugins.training.student import Teacher

    try:
        teacher = Teacher(model, is_kept=False)
    except ConfigError as error:
        _say_equal(str(error))
        return None
    needed, available = _needed_bytes(model, teacher), free_bytes(learning_device())
    if needed > available:
        _say_equal(
            f"measuring shares needs about {size_text(needed)} of memory, but "
            f"{size_text(available)} are available"
        )
        return None
    with evaluator_of(model) as (opened, evaluator):
        windows = _windows(opened, evaluator, text)
    return shares_on(teacher, windows, operands, tensors)


def share_rows(windows: NDArray[np.int32], *, is_own: bool) -> list[Tokens]:
    """Return those of some equally long windows with which shares are measured.

    Args:
        windows: Text to learn from.
        is_own: Whether the model wrote it, so that packaged text is the other half.
    """
    return list(windows[: (_N_TOKENS // 2 if is_own else _N_TOKENS) // _WINDOW])


def packaged_windows(model: Any, evaluator: Evaluator) -> list[Tokens]:
    """Return windows of the packaged texts of several kinds, the half of ``_N_TOKENS``."""
    texts = packaged_tokens(model, _N_TOKENS // 2).values()
    return [window for each in texts for window in evaluator.cut(each, _WINDOW)]


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


def shares_path(folder: Path, rows: Sequence[Tokens]) -> Path:
    """Return the path in a folder for progress of the shares that some rows of text decide."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.tobytes())
    return folder / f"shares-{digest.hexdigest()[:16]}.progress"


def steps_of(shares: Shares) -> NDArray[np.int32]:
    """Return shares as numbers of ``GRID``'s steps, one row an operand."""
    import numpy as np

    from llmaas_plugins.flash_weights.shares import GRID

    return np.stack([np.rint(share / GRID[1]) for share in shares.values()]).astype(np.int32)


def shares_of(steps: NDArray[np.int32]) -> list[Share]:
    """Return the shares of ``steps_of``."""
    import numpy as np

    from llmaas_plugins.flash_weights.shares import GRID

    return [*GRID[steps].astype(np.float32)]


def kept_steps(
    path: Path,
    identity: Mapping[str, Any],
    n_operands: int,
    measure: Callable[[], NDArray[np.int32]],
) -> NDArray[np.int32]:
    """Return the steps that a file keeps; else measure and keep them.

    Args:
        path: The file.
        identity: Model and text that decide the shares, as JSON types.
        n_operands: Number of operands.
        measure: Function that measures the steps.

    Raises:
        StoreError: The file cannot be written.
    """
    from llmaas_plugins.elastic.checkpoint import Checkpoint, fingerprint_of

    kept = Checkpoint(path, fingerprint_of(identity))
    found = kept.get("steps")
    if found is None or not _may_be_steps(found, n_operands):
        found = measure()
        kept.keep({"steps": found})
        kept.save()
    return found


# -- internals -----------------------------------------------------------------------------------


def _needed_bytes(model: Path, teacher: Teacher) -> int:
    """Return about how much memory it takes to measure shares, with what the process has."""
    from llmaas_plugins.training.costs import weights_bytes
    from llmaas_plugins.training.distillation import SparseRecipe
    from llmaas_plugins.training.distillation_costs import distillation_bytes

    recipe = SparseRecipe(_WINDOW, n_rows=1)  # a window at a time, but nothing learns
    whole = weights_bytes(model)
    step = distillation_bytes(
        whole, teacher.blocks, 0, teacher.n_vocab, recipe, _WINDOW, is_kept=False
    )
    kept = 4 * (teacher.blocks.n_layers + 1) * teacher.blocks.n_embd * _N_TOKENS
    return step + kept


def _may_be_steps(steps: NDArray[Any], n_operands: int) -> bool:
    """Return whether an array from a file may be what ``steps_of`` returns."""
    import numpy as np

    from llmaas_plugins.flash_weights.shares import GRID, SPARSITIES, is_share

    is_usable = steps.dtype == np.int32 and steps.shape == (n_operands, len(SPARSITIES))
    if not is_usable or steps.min() < 0 or steps.max() >= len(GRID):
        return False
    return all(map(is_share, shares_of(steps)))


def _say_equal(reason: str) -> None:
    print(f"The sparse mode leaves out the same share of each activation: {reason}", flush=True)


def _windows(model: Any, evaluator: Evaluator, text: bytes | None) -> list[Tokens]:
    if text is not None:
        return list(evaluator.chosen(tokens_of(text, model), _N_TOKENS))
    with progress_bar("writing text", "token", n := _N_TOKENS // 2) as bar:
        own = evaluator.say(n, SEED, bar.update)
    return [*evaluator.cut(own, _WINDOW), *packaged_windows(model, evaluator)]
