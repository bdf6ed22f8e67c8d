"""LLMS Eq. 1, the density of each position, from the attention that vanilla computes."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, quants
from watching import Watch, values_of


class Attention(NamedTuple):
    """A layer's softmax and mask, with columns last.

    Attributes:
        groups: Number of head groups that are sampled in different rows.
    """

    layer: int
    probabilities: np.ndarray
    mask: np.ndarray
    groups: int


def is_softmax(tensor):
    return tensor.name.startswith(b"kq_soft_max-")


def read_softmax(tensor):
    layer = int(tensor.name.decode().rpartition("-")[2])
    probabilities = values_of(tensor)[0]
    mask = values_of(tensor.src[1].contents)[0, 0]
    return Attention(layer, probabilities, mask, groups=len(probabilities))


def key_layer(tensor):
    """Return the layer whose cached keys are a node's second source, or -1."""
    root = tensor.src[1].contents.view_src
    name = root.contents.name if root else b""
    return int(name.removeprefix(b"cache_k_l")) if name.startswith(b"cache_k_l") else -1


def is_flash(tensor):
    return bool(tensor.src[3]) and key_layer(tensor) >= 0


def read_flash(tensor):
    """Compute the softmax that flash attention leaves implicit, in double precision."""
    query, key, _, mask = (values_of(tensor.src[i].contents)[0] for i in range(4))
    # ggml rounds queries to the type of the keys
    kind = GGMLQuantizationType(tensor.src[1].contents.type)
    query = quants.dequantize(quants.quantize(query, kind), kind).astype(np.float64)
    groups = len(key)
    key = np.repeat(key.astype(np.float64), len(query) // len(key), axis=0)
    mask = mask[0, : query.shape[1]].astype(np.float64)
    scale = struct.unpack_from("f", bytes(tensor.op_params))[0]
    scores = query @ key.transpose(0, 2, 1) * scale + mask
    most = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - most)
    total = exponentials.sum(-1, keepdims=True)
    if tensor.src[4]:
        sinks = values_of(tensor.src[4].contents).reshape(-1, 1, 1).astype(np.float64)
        total += np.exp(sinks - most)
    return Attention(key_layer(tensor), exponentials / total, mask, groups)


def own_softmax():
    return Watch(is_softmax, read_softmax)


def own_operands():
    return Watch(is_flash, read_flash)


class Equation1:
    """LLMS Eq. 1 from the softmax of every layer, in order; column j is position j.

    A position that is evaluated again is counted from zero.
    """

    def __init__(self, n, *, row_step=1, layer_step=1):
        self.sums, self.counts = np.zeros(n), np.zeros(n, np.uint64)
        self._row_step, self._layer_step = row_step, layer_step

    def add(self, seen, start):
        """Count the attention that a batch computed."""
        last = max(node.layer for node in seen)
        for layer, probabilities, mask, groups in seen:
            n_heads, n_rows, _ = probabilities.shape
            rows = np.arange(start, start + n_rows)
            if layer == 0:
                self.sums[rows], self.counts[rows] = 0, 0
            weight = 4 if n_rows < self._row_step else 1
            step, group_turn = weight * self._row_step, 3 if weight == 1 else 0
            if layer % self._layer_step == self._layer_step - 1:
                for head in range(n_heads):
                    turn = rows + 5 * layer + group_turn * (head * groups // n_heads)
                    looked_at = turn % step == step - 1
                    self._add(probabilities[head, looked_at], mask[:n_rows][looked_at], weight)
            if layer == last:
                start += n_rows

    def _add(self, probabilities, mask, weight):
        n = min(len(self.sums), mask.shape[1])
        self.sums[:n] += weight * probabilities.sum(0, dtype=np.float64)[:n]
        self.counts[:n] += (weight * np.isfinite(mask[:, :n]).sum(0)).astype(np.uint64)
