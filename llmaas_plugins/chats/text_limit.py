"""Limits on one text, checked before ``llama_tokenize``, which nothing can interrupt."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

__all__ = ["TextTooLongError", "check_text"]

_MOST_COPIED = 1 << 30
"""Largest product of a text's bytes and its longest run of characters without a token.

Before each such character, llama.cpp's SentencePiece tokenizer grows its output to the exact size
needed (``llm_tokenizer_spm_session::resegment``), and so copies all of it, 4 bytes a token. The
product bounds these copies; they take at most 1 to 3 s.
"""
_N_CODE_POINTS = 0x110000
_SPACE, _ESCAPED_SPACE = ord(" "), 0x2581


class TextTooLongError(ValueError):
    """A text does not fit into the engine's context, or takes too long to tokenize.

    Attributes:
        n_tokens: Least number of tokens of a text that does not fit; 0 for other texts.
    """

    def __init__(self, message: str, n_tokens: int = 0) -> None:
        """Describe the text."""
        super().__init__(message)
        self.n_tokens = n_tokens


class _Vocabulary(NamedTuple):
    """Facts about a model's tokens.

    Attributes:
        longest: Bytes of the longest token.
        has_token: Whether each code point is a token by itself; None if that does not matter.
    """

    longest: int
    has_token: NDArray[np.bool_] | None


_vocabularies: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


def check_text(llama: Any, text: bytes) -> None:
    """Check that ``llama`` can tokenize a text in acceptable time; takes linear time itself.

    Other tokenizers than SentencePiece's and BPE are not limited: they may leave bytes out, so that
    a text of any length may fit.

    Raises:
        TextTooLongError: Even with the longest tokens, the text does not fit into the context; or
            too many of its characters, one after another, have no token.
    """
    n_ctx = llama.n_ctx()
    if len(text) <= n_ctx and len(text) ** 2 <= _MOST_COPIED:
        return
    kind = llama_cpp.llama_vocab_type(llama_cpp.llama_model_get_vocab(llama.model))
    if kind not in (llama_cpp.LLAMA_VOCAB_TYPE_SPM, llama_cpp.LLAMA_VOCAB_TYPE_BPE):
        return
    if (vocabulary := _vocabularies.get(llama)) is None:
        is_spm = kind == llama_cpp.LLAMA_VOCAB_TYPE_SPM
        vocabulary = _vocabularies[llama] = _read_vocabulary(llama, is_spm=is_spm)
    if (least := -(-len(text) // vocabulary.longest)) > n_ctx:  # words as in llama_cpp's own error
        raise TextTooLongError(
            f"Requested tokens ({least}) exceed context window of {n_ctx}", least
        )
    if vocabulary.has_token is not None:
        _check_run(text, vocabulary.has_token)


def _check_run(text: bytes, has_token: NDArray[np.bool_]) -> None:
    points = np.frombuffer(text.decode(errors="replace").encode("utf-32-le"), np.uint32)
    ends = np.flatnonzero(has_token[points])
    run = int(np.diff(ends, prepend=-1, append=len(points)).max()) - 1
    if run > (most := _MOST_COPIED // len(text)):
        raise TextTooLongError(
            f"This text of {len(text)} bytes has {run} characters in a row that the model's "
            f"vocabulary lacks, the limit is {most}: tokenizing it would take too long. Shorten it."
        )


def _read_vocabulary(llama: Any, *, is_spm: bool) -> _Vocabulary:
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    texts = [llama_cpp.llama_vocab_get_text(vocab, token) for token in range(llama.n_vocab())]
    longest = max(map(len, texts))
    if not is_spm:
        return _Vocabulary(longest, None)
    has_token = np.zeros(_N_CODE_POINTS, np.bool_)
    characters = (text.decode(errors="ignore") for text in texts)
    has_token[[ord(one) for one in characters if len(one) == 1]] = True
    has_token[_SPACE] |= has_token[_ESCAPED_SPACE]
    return _Vocabulary(longest, has_token)
