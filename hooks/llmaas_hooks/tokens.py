"""Functions on token ids that the host and plugins share."""

from __future__ import annotations

from llmaas_hooks.types import Tokens

__all__ = ["common_prefix"]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common prefix of ``a`` and ``b``.

    Args:
        a: Token ids, shape ``(n,)``.
        b: Token ids, shape ``(m,)``.
    """
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(same.argmin())
