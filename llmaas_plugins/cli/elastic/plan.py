"""Steps of ``llmaas elastic prepare``, and what they take."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from llmaas_plugins.cli.elastic.score import SCORE, WRITE_TEXT, n_scored_tokens
from llmaas_plugins.cli.elastic.search import FIT, SEARCH, n_search_tokens
from llmaas_plugins.cli.elastic.steps import Step
from llmaas_plugins.cli.elastic.text import N_TOKENS, n_written_tokens
from llmaas_plugins.cli.elastic.writing import n_written_bytes

if TYPE_CHECKING:
    from llmaas_plugins.cli.elastic.estimates import Speeds
    from llmaas_plugins.elastic.units import Blocks

__all__ = ["ADD", "WRITE_UNIFORM", "Done", "disk_bytes", "memory_bytes", "planned"]

WRITE_UNIFORM, ADD = "order units and write uniform widths", "add the widths found"
"""Names of steps."""

_MEMORY_BYTES = 768 << 20
"""Most memory beside the model and a layer: logits, and the predictions to compare with."""
_HALF_SHARE = 0.7
"""Weight of half-width evaluations in a search, which begins with all units and ends at 20 %."""
_FIT_READINGS = 20
"""Evaluations of each table: nine levels and the whole model, with biases and without."""


class Done(NamedTuple):
    """Steps that earlier runs did.

    Attributes:
        text: Whether the model has written text.
        scores: Whether units are scored.
        uniform: Whether the file with uniform widths is written.
    """

    text: bool
    scores: bool
    uniform: bool


def planned(
    args: argparse.Namespace, blocks: Blocks, speeds: Speeds, done: Done, *, is_apart: bool
) -> list[Step]:
    """Return the steps of a run, with estimates.

    Args:
        args: Arguments of the command.
        blocks: Blocks of the model.
        speeds: Measured speeds.
        done: Steps that earlier runs did.
        is_apart: Whether ``ffn_down`` is quantized again.
    """
    steps, is_improved = list[Step](), args.is_searched or args.compensate
    if not done.scores or is_improved:
        steps.append(Step(WRITE_TEXT, n_written_tokens(args) * speeds.write_s, done.text))
    if not done.scores or done.text:
        n_graded = (args.tokens or N_TOKENS) if args.gradients else 0
        seconds = n_scored_tokens(args, blocks) * speeds.read_s + n_graded * speeds.gradient_s
        steps.append(Step(SCORE, seconds, done.scores))
    seconds = n_written_bytes(args) * speeds.store_s + is_apart * speeds.requantize_s
    steps.append(Step(WRITE_UNIFORM, None if args.quantize else seconds, done.uniform))
    return [*steps, *(_further(args, blocks, speeds) if is_improved else ())]


def memory_bytes(args: argparse.Namespace, blocks: Blocks) -> int:
    """Return the most memory: the model as llama.cpp loads it, a matrix in float32, and more."""
    return int(args.model.stat().st_size + 4 * blocks.n_ff * blocks.n_embd + _MEMORY_BYTES)


def disk_bytes(args: argparse.Namespace) -> int:
    """Return about how many bytes of files there are at once beside the model."""
    n_files = 3 if args.quantize else 2 if args.is_searched or args.compensate else 1
    return int(n_files * args.model.stat().st_size)


# -- internals -----------------------------------------------------------------------------------


def _further(args: argparse.Namespace, blocks: Blocks, speeds: Speeds) -> list[Step]:
    """Return the steps that follow the uniform widths."""
    from llmaas_plugins.elastic.searching import n_losses
    from llmaas_plugins.elastic.uniform import step_of

    steps, n_tokens = list[Step](), n_search_tokens(blocks, args.tokens or N_TOKENS)
    token_s = speeds.half_s * _HALF_SHARE + speeds.read_s * (1 - _HALF_SHARE)
    if args.is_searched:
        steps.append(Step(SEARCH, n_losses(blocks, step_of(blocks)) * n_tokens * token_s))
    if args.compensate:
        n_tables = 2 if args.is_searched else 1
        steps.append(Step(FIT, n_tables * _FIT_READINGS * n_tokens * token_s))
    return [*steps, Step(ADD, args.model.stat().st_size * speeds.store_s)]
