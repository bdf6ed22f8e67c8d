"""Writing of a prepared file with uniform widths."""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmaas_plugins.files.temporary_folder import folder_beside

if TYPE_CHECKING:
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.reordering import Order
    from llmaas_plugins.elastic.units import Blocks, Scores

__all__ = ["n_written_bytes", "write_target"]

_POLL_S = 0.5


def n_written_bytes(args: argparse.Namespace) -> int:
    """Return about how many bytes ``write_target`` writes."""
    n_bytes = args.model.stat().st_size
    return int(n_bytes if args.quantize is None else 3 * n_bytes)


def write_target(  # noqa: PLR0913 -- a file, its content, and how it is made
    args: argparse.Namespace,
    target: Path,
    order: Order,
    scores: Scores,
    progress: Callable[[int], None],
    *,
    is_apart: bool,
) -> None:
    """Write a prepared file with uniform widths, from a quantized copy if that was requested.

    Args:
        args: Arguments of the command.
        target: Path of the prepared file.
        order: New order of the model's units.
        scores: Scores of the units.
        progress: Called with the number of bytes just written.
        is_apart: Whether neurons move one by one, and ``ffn_down`` is quantized again.
    """
    from llmaas_plugins.elastic.prepared_file import write_prepared
    from llmaas_plugins.elastic.units import blocks_of

    cuts = args.cut_keys_values
    if args.quantize is None:
        elastic = _described(blocks_of(args.model, cuts_keys_values=cuts), scores)
        for n in write_prepared(args.model, target, elastic, order, takes_blocks_apart=is_apart):
            progress(n)
        return
    with _quantized(args, target, order, progress) as source:
        elastic = _described(blocks_of(source, cuts_keys_values=cuts), scores)
        for n in write_prepared(source, target, elastic, order, is_ordered=True):
            progress(n)


# -- internals -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _quantized(
    args: argparse.Namespace, target: Path, order: Order, progress: Callable[[int], None]
) -> Iterator[Path]:
    """Yield a reordered and quantized copy of the model, deleted afterwards."""
    from llmaas_plugins.elastic.prepared_file import write_reordered
    from llmaas_plugins.model.quantize import quantize

    with folder_beside(target) as folder:
        ordered, quantized = folder / "ordered.gguf", folder / "quantized.gguf"
        for n in write_reordered(args.model, ordered, order):
            progress(n)
        with _watched(quantized.with_suffix(".partial"), progress):
            quantize(ordered, quantized, args.quantize)
        ordered.unlink()
        yield quantized


@contextlib.contextmanager
def _watched(path: Path, progress: Callable[[int], None]) -> Iterator[None]:
    """Report how a file grows that other code writes."""
    is_done = threading.Event()

    def watch() -> None:
        n_known = 0
        while not is_done.wait(_POLL_S):
            with contextlib.suppress(OSError):
                n_bytes = path.stat().st_size
                progress(n_bytes - n_known)
                n_known = n_bytes

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _described(blocks: Blocks, scores: Scores) -> Elastic:
    """Return the metadata of a prepared file with uniform widths."""
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.uniform import LEVELS, anchors_of, step_of, uniform_widths

    assert scores.layers is not None
    step = step_of(blocks)
    return Elastic(
        blocks=blocks,
        levels=LEVELS,
        step=step,
        tables={"uniform": uniform_widths(blocks, LEVELS, scores.layers, step)},
        anchors=anchors_of(scores.layers),
        calibration=scores.calibration,
        source=None,
        biases={},
    )
