"""Narrowed models of other papers, each at the shares of the weights that our levels have.

They are corrected: a method that leaves out layers keeps the next larger number of them, and the
whole model at 100 %. They are made for one model and calibrated on the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmaas_eval.data import packaged_documents
from llmaas_eval.elastic.engine import Variant, readings
from llmaas_eval.elastic.scores import layers_to_drop, llm_pruner_scores
from llmaas_eval.elastic.sizes import kept_layers
from llmaas_eval.elastic.texts import Windows, windows_of
from llmaas_eval.weights import kept_f16_copy
from llmaas_plugins.elastic.prepared_file import write_reordered
from llmaas_plugins.elastic.reordering import order_by
from llmaas_plugins.elastic.uniform import step_of, uniform_widths
from llmaas_plugins.elastic.units import Blocks, Widths, blocks_of, without_layers

__all__ = ["BASELINES", "SCRATCH", "Narrowed", "Source", "narrowed"]


@dataclass(frozen=True, slots=True)
class Source:
    """Model to narrow.

    Attributes:
        path: GGUF file, in F16 so that torch computes it.
        levels: Shares of the blocks' weights, widest first.
        calibration: Text to score importance on.
        folder: Folder for model files.
        scratch: Models that were trained from scratch, by share; empty if there are none.
    """

    path: Path
    levels: Sequence[float]
    calibration: Windows
    folder: Path
    scratch: Mapping[float, Path]

    @property
    def blocks(self) -> Blocks:
        """Units of the model."""
        return blocks_of(self.path)


_N_WINDOWS, _N_TOKENS = 16, 512
SCRATCH = "PFS"
"""Baseline that needs models which were trained from scratch."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A narrowed model, which is made when its answers are missing.

    Attributes:
        shares: Shares of the weights that it serves, widest first.
        make: Function that returns its file and widths.
        has_levels: Whether it has a level for each share, or is the same for all.
    """

    shares: Sequence[float]
    make: Callable[[], Variant]
    has_levels: bool = True

    @property
    def places(self) -> dict[float, int]:
        """Index of the model's level that serves each share."""
        return {share: i * self.has_levels for i, share in enumerate(self.shares)}

    @property
    def label(self) -> str:
        """Name of the model among the method's."""
        return "-".join(f"{share:g}" for share in self.shares)


def _of_levels(make: Callable[[Source], Variant]) -> Callable[[Source], Iterator[Narrowed]]:
    """Return a function that yields one model, whose levels serve all shares."""

    def one(source: Source) -> Iterator[Narrowed]:
        yield Narrowed(source.levels, lambda: make(source))

    return one


def _llm_pruner(source: Source) -> Variant:
    """Return LLM-Pruner's order and grouping, in equal widths but for its first and last layer."""
    blocks, path = source.blocks, source.folder / "llm-pruner.gguf"
    scores = llm_pruner_scores(source.path, source.calibration)
    for _ in write_reordered(source.path, path, order_by(blocks, scores)):
        pass
    ends = np.zeros(blocks.n_layers)
    ends[[0, -1]] = 1
    widths = uniform_widths(blocks, source.levels, ends, step_of(blocks))
    return Variant(path, blocks, widths)


def _by_loss(source: Source) -> Variant:
    """Return the model without the layers whose absence raises the loss least (LE)."""
    blocks = source.blocks
    absent = [without_layers(blocks, [layer]) for layer in range(blocks.n_layers)]
    found = readings(source.path, Variant(source.path, blocks, absent), source.calibration, "LE")
    order = np.argsort([reading.nats.mean() for reading in found], kind="stable").tolist()
    return Variant(source.path, blocks, _without(source, order))


def _shortgpt(source: Source) -> Variant:
    """Return the model without the layers that change their input least (ShortGPT)."""
    order = layers_to_drop(source.path, source.calibration)
    return Variant(source.path, source.blocks, _without(source, order))


def _attention_drop(source: Source) -> Variant:
    """Return the model without attention first, then without MLPs, least influence first."""
    blocks = source.blocks
    attention, mlp = _influences(source)
    order = [("groups", layer) for layer in np.argsort(attention, kind="stable").tolist()]
    order += [("neurons", layer) for layer in np.argsort(mlp, kind="stable").tolist()]
    widths, i = [], 0
    kept = without_layers(blocks, [])
    for level in source.levels:
        while True:
            after = _dropped(kept, *order[i])
            if blocks.share(after) < level - 1e-9:
                break  # the next larger share, in the method's favor
            kept, i = after, i + 1
        widths.append(kept)
    return Variant(source.path, blocks, widths)


def _laco(source: Source) -> Iterator[Narrowed]:
    """Yield models whose layers were merged into the layer before them (LaCo)."""
    blocks = source.blocks
    n_kept = {level: kept_layers(blocks, level).n for level in source.levels}
    for n in sorted({*n_kept.values()}, reverse=True):
        levels = [level for level in source.levels if n_kept[level] == n]
        yield Narrowed(levels, functools.partial(_merged, source, n), has_levels=False)


def _from_scratch(source: Source) -> Iterator[Narrowed]:
    """Yield small models that were trained from scratch (PFS): the largest one for each level."""
    served = dict[Path, list[float]]()
    for level in source.levels:
        fitting = [share for share in source.scratch if share <= level + 1e-9]
        path = source.path if level == 1.0 else source.scratch[max(fitting)]
        served.setdefault(path, []).append(level)
    for path, levels in served.items():
        yield Narrowed(levels, functools.partial(Variant, path), has_levels=False)


BASELINES: Mapping[str, Callable[[Source], Iterator[Narrowed]]] = {
    "LLM-Pruner": _of_levels(_llm_pruner),
    "LE": _of_levels(_by_loss),
    "LaCo": _laco,
    "ShortGPT": _of_levels(_shortgpt),
    "AttnDrop": _of_levels(_attention_drop),
    SCRATCH: _from_scratch,
}
"""Function that makes each baseline's models."""


def narrowed(
    method: str,
    model: Path,
    levels: Sequence[float],
    folder: Path,
    scratch: Mapping[float, Path],
) -> Iterator[Narrowed]:
    """Yield a method's models, which are calibrated on packaged text.

    Args:
        method: One of ``BASELINES``.
        model: GGUF file of the model to narrow.
        levels: Shares of the blocks' weights, widest first.
        folder: Folder for the files of all methods.
        scratch: Models that were trained from scratch, by share.
    """
    own = folder / f"{model.stem}-{method}"
    source = kept_f16_copy(model, own)
    windows = windows_of(source, packaged_documents(), _N_WINDOWS, _N_TOKENS)
    yield from BASELINES[method](Source(source, levels, windows, own, scratch))


# -- inside --------------------------------------------------------------------------------------


def _merged(source: Source, n: int) -> Variant:
    """Return the model with its layers merged into ``n``."""
    from llmaas_eval.elastic.laco import write_merged

    if n == source.blocks.n_layers:
        return Variant(source.path)
    return Variant(
        write_merged(source.path, source.folder / f"laco-{n}.gguf", n, source.calibration)
    )


def _without(source: Source, order: Sequence[int]) -> list[Widths]:
    """Return the widths of each level without the first layers of an order."""
    blocks = source.blocks
    n_kept = [kept_layers(blocks, level).n for level in source.levels]
    return [without_layers(blocks, order[: blocks.n_layers - n]) for n in n_kept]


def _dropped(widths: Widths, part: str, layer: int) -> Widths:
    """Return widths without the attention, or the MLP, of one more layer."""
    groups, neurons = widths.groups.copy(), widths.neurons.copy()
    (groups if part == "groups" else neurons)[layer] = 0
    return Widths(groups, neurons)


def _influences(source: Source) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return 1 minus the mean cosine similarity of input and output, of attention and of MLPs."""
    import torch

    from llmaas_plugins.elastic.torch_model import Decoder

    decoder = Decoder(source.path)
    x = decoder.embed(source.calibration.astype(np.int32))
    found = np.empty((2, decoder.blocks.n_layers))
    for layer in range(decoder.blocks.n_layers):
        weights = dict(decoder.weights(layer))
        down = weights["ffn_down.weight"]
        no_mlp = weights | {"ffn_down.weight": torch.zeros_like(down)}
        with torch.no_grad():
            between = torch.stack([decoder.block(layer, no_mlp, each) for each in x])
            after = torch.stack([decoder.block(layer, weights, each) for each in x])
        for part, (before, behind) in enumerate(((x, between), (between, after))):
            found[part, layer] = 1 - float(torch.cosine_similarity(before, behind, dim=-1).mean())
        x = after
    return found[0], found[1]
