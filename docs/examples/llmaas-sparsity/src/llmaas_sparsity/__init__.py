"""How sparse the inputs of feed-forward blocks are, counted inside the engine."""

from llmaas_sparsity.plugin import Sparsity, SparsityConfig

__all__ = ["Sparsity", "SparsityConfig"]
