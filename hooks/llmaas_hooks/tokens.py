"""What host and plugins do with token ids."""

from __future__ import annotations

from llmaas_hooks.types import Tokens

__all__ = ["common_prefix"]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of ``a``, shape ``(n,)``, and ``b``, shape ``(m,)``."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())
