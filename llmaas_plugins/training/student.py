"""A level of an elastic model with an adapter, beside the whole model that it learns from.

Both use the same frozen weights: the level's matrices are views of the whole model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llmaas_hooks.native.low_rank import LowRank
from llmaas_plugins.elastic.torch_model import Decoder, Weights
from llmaas_plugins.elastic.units import Blocks, Widths
from llmaas_plugins.training.device import learning_device

__all__ = ["ADAPTED", "Level", "Teacher", "dimensions_of"]

ADAPTED = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Matrices with adapters. Keys and values have none, so cells stay valid at every level."""

_DOWN, _UP = "adapter_a", "adapter_b"


class Teacher(Decoder):
    """The whole model. Its matrices add an adapter where a layer's weights contain one.

    Attributes:
        is_kept: Whether all weights stay in memory as float32. Otherwise each layer is read when it
            is computed.
    """

    def __init__(self, path: Path, *, is_kept: bool = True) -> None:
        """Map a GGUF into memory, and read its weights if they are to be kept.

        Raises:
            ConfigError: As ``Decoder``.
            StoreError: The file cannot be read.
        """
        super().__init__(path)
        self.is_kept, self.device = is_kept, learning_device()
        self._ends: dict[str, Tensor] = {}
        self._layers: list[Weights] = []
        self._seen: dict[str, Tensor] | None = None
        if is_kept:
            ends = [name for name in self._tensors if not name.startswith("blk.")]
            self._ends = {name: super(Teacher, self)._read(name) for name in ends}
            self._layers = [super(Teacher, self).weights(i) for i in range(self.blocks.n_layers)]

    def weights(self, layer: int) -> Weights:
        """Return the weights of a layer, which are read if they are not kept."""
        return self._layers[layer] if self._layers else super().weights(layer)

    def apply(self, layer: int, inputs: Tensor, gates: object = None) -> Tensor:
        """Return the outputs of a layer of the whole model, without gradients."""
        del gates
        with torch.no_grad():
            return self.block(layer, self.weights(layer), inputs)

    def product(self, layer: int, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Return ``x`` multiplied by a matrix, with its adapter if the weights contain one."""
        if self._seen is not None:
            self._seen[name] = x
        y = super().product(layer, weights, name, x)
        down = weights.get(f"{name}.{_DOWN}")
        if down is None:
            return y
        return y + functional.linear(functional.linear(x, down), weights[f"{name}.{_UP}"])

    def operands(self, layer: int, weights: Weights, x: Tensor) -> tuple[Tensor, Weights]:
        """Return a layer's outputs, and the inputs of its matrices by the matrices' names."""
        seen = dict[str, Tensor]()
        self._seen = seen
        try:
            return self.block(layer, weights, x), seen
        finally:
            self._seen = None

    def _read(self, name: str, rows: slice | NDArray[np.int32] = slice(None)) -> Tensor:
        kept = self._ends.get(name)
        return super()._read(name, rows) if kept is None else kept[rows]


class Level(nn.Module):
    """A model at some widths, with an adapter at each matrix of ``adapted``.

    The parameters are named ``layer:matrix:a`` and ``layer:matrix:b``.
    """

    adapted: ClassVar[tuple[str, ...]] = ADAPTED

    def __init__(
        self,
        teacher: Teacher,
        widths: Widths,
        rank: int,
        seed: int = 0,
        biases: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    ) -> None:
        """Make adapters that change nothing yet: B is 0, and A is random.

        Args:
            teacher: The whole model, with its units in the prepared order.
            widths: Widths of the level.
            rank: Rank of the adapters.
            seed: Seed of A.
            biases: Biases that the level adds to products, by weight name; ``(n_embd,)``.
        """
        super().__init__()
        self.teacher, self.widths, self.rank = teacher, widths, rank
        device = teacher.device
        self._biases = {name: torch.from_numpy(each).to(device) for name, each in biases.items()}
        chance = torch.Generator().manual_seed(seed)
        self.adapters = nn.ParameterDict()
        for layer in range(teacher.blocks.n_layers):
            for name in self.adapted:
                n_in, n_out = dimensions_of(teacher.blocks, widths, layer, name)
                a = torch.randn(rank, n_in, generator=chance) / n_in**0.5
                self.adapters[f"{layer}:{name}:a"] = nn.Parameter(a.to(device))
                b = torch.zeros(n_out, rank, device=device)
                self.adapters[f"{layer}:{name}:b"] = nn.Parameter(b)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the last layer's outputs for int32 windows, ``(n_windows, n_tokens, n_embd)``."""
        x = self.teacher.embed(windows.numpy())
        for layer in range(self.teacher.blocks.n_layers):
            x = self.apply_layer(layer, x)
        return x

    def apply_layer(self, layer: int, x: Tensor) -> Tensor:
        """Return a layer's outputs. Weights that are not kept are read again for the gradient."""

        def block(x: Tensor) -> Tensor:
            return self.teacher.block(layer, self.weights(layer), x)

        if self.teacher.is_kept or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=False)

    def weights(self, layer: int) -> Weights:
        """Return the part of a layer's weights that the level uses, and the adapters."""
        found = self.narrowed(layer)
        for name in self.adapted:
            bias = self._biases.get(f"blk.{layer}.{name}.weight")
            if bias is not None:
                found[f"{name}.bias"] = bias + found.get(f"{name}.bias", 0)
            found[f"{name}.{_DOWN}"], found[f"{name}.{_UP}"] = self.pair(layer, name)
        return found

    def narrowed(self, layer: int) -> dict[str, Tensor]:
        """Return views of the part of a layer's weights that the level uses.

        Keys and values of groups that are left out are not computed: nothing at this level reads
        them.
        """
        blocks, found = self.teacher.blocks, dict(self.teacher.weights(layer))
        n_groups, neurons = int(self.widths.groups[layer]), int(self.widths.neurons[layer])
        heads, keys = n_groups * blocks.group_width, n_groups * blocks.head_dim
        rows = dict.fromkeys(("ffn_gate", "ffn_up"), neurons)
        rows |= {"attn_q": heads, "attn_k": keys, "attn_v": keys}
        for name, n in rows.items():
            for part in (f"{name}.weight", f"{name}.bias"):
                if part in found:
                    found[part] = found[part][:n]
        found["attn_output.weight"] = found["attn_output.weight"][:, :heads]
        found["ffn_down.weight"] = found["ffn_down.weight"][:, :neurons]
        return found

    def pair(self, layer: int, name: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a matrix."""
        return self.adapters[f"{layer}:{name}:a"], self.adapters[f"{layer}:{name}:b"]

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of the parameters by name."""
        return {name: each.detach().cpu().numpy().copy() for name, each in self.adapters.items()}

    def put(self, stored: Mapping[str, LowRank]) -> None:
        """Use stored adapters, which may have other ranks, by the names of their weights."""
        for layer, name in product(range(self.teacher.blocks.n_layers), self.adapted):
            one = stored.get(f"blk.{layer}.{name}.weight")
            if one is not None:
                for part, values in zip("ab", one.floats(), strict=True):
                    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self.teacher.device)
                    self.adapters[f"{layer}:{name}:{part}"] = nn.Parameter(tensor)

    def load(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Set the parameters."""
        with torch.no_grad():
            for name, parameter in self.adapters.items():
                parameter.copy_(torch.from_numpy(arrays[name]))


def dimensions_of(blocks: Blocks, widths: Widths, layer: int, name: str) -> tuple[int, int]:
    """Return the columns and rows of a matrix that a level uses."""
    n_groups, n_embd = int(widths.groups[layer]), blocks.n_embd
    heads, keys = n_groups * blocks.group_width, n_groups * blocks.head_dim
    neurons = int(widths.neurons[layer])
    return {
        "attn_q": (n_embd, heads),
        "attn_k": (n_embd, keys),
        "attn_v": (n_embd, keys),
        "attn_output": (heads, n_embd),
        "ffn_gate": (n_embd, neurons),
        "ffn_up": (n_embd, neurons),
        "ffn_down": (neurons, n_embd),
    }[name]
