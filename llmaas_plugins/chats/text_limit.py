"""Limits on one text, checked before ``llama_tokenize``, which nothing can interrupt."""

from __future__ import annotations

import functools
import re
import resource
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_plugins.chats.matched_runs import longest_run

__all__ = ["TextTooLongError", "check_text"]

_MOST_COPIED = 1 << 30
"""Largest product of a text's bytes and its longest run of characters without a token.

Before each such character, llama.cpp's SentencePiece tokenizer grows its output to the exact size
needed (``llm_tokenizer_spm_session::resegment``), and so copies all of it, 4 bytes a token. The
product bounds these copies; they take at most 1 to 3 s.
"""
_MOST_MATCHED, _FULL_STACK, _DEFAULT_STACK = 12_000, 8 << 20, 2 << 20
"""Most characters that llama.cpp may have to match at once, with 8 MiB of stack.

Most BPE models have llama.cpp split texts by ``std::regex``, which recurses once for each character
that it matches: about 27,000 characters end the process. Without a limit on the stack, threads of
glibc have 2 MiB.
"""
_OWN_SPLITS = frozenset({"gpt-2", "llama-bpe", "qwen2", "smollm", "refact", "gemma4"})
"""Values of ``tokenizer.ggml.pre`` for which llama.cpp splits by code of its own instead."""
_TWO_SPACES = re.compile(r" \s|\s ")
_DIGITS = re.compile(rb"[0-9]+")
_MOST_DIGIT_PAIRS = 1 << 22
"""Largest sum of the squares of numbers' lengths, which takes about 1 s.

At each digit of a number, an expression of this model's tokenizer looks at all that follow.
"""
_MOST_COMPARED = 1 << 28
"""Most comparisons with the tokens that llama.cpp searches for one by one; they take 1 to 2 s."""
_SEARCHED = (
    llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
    | llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
)
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
        n_searched: Number of tokens that texts are searched for, by their first byte.
        has_token: Whether each code point is a token by itself; None if that does not matter.
    """

    longest: int
    n_searched: NDArray[np.int64]
    has_token: NDArray[np.bool_] | None


_vocabularies: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


def check_text(llama: Any, text: bytes) -> None:
    """Check that ``llama`` can tokenize a text in acceptable time; takes linear time itself.

    Other tokenizers than SentencePiece's and BPE are not limited: they may leave bytes out, so that
    a text of any length may fit.

    Raises:
        TextTooLongError: Even with the longest tokens, the text does not fit into the context; or
            it would take too long, or more stack than there is, or fail.
    """
    pre = llama.metadata.get("tokenizer.ggml.pre")
    if pre == "whitespace":
        _check_spaces(text)
    elif pre == "superbpe":
        _check_digits(text)
    n_ctx = llama.n_ctx()
    if len(text) <= min(n_ctx, _most_matched()):
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
    _check_searched(text, vocabulary.n_searched)
    points = np.frombuffer(text.decode(errors="replace").encode("utf-32-le"), np.uint32)
    if vocabulary.has_token is not None:
        _check_run(text, points, vocabulary.has_token)
    elif pre not in _OWN_SPLITS:
        _check_matched(points, pre)


@functools.cache
def _most_matched() -> int:
    """Return the most characters for the stack that this process's threads have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _DEFAULT_STACK if soft == resource.RLIM_INFINITY else soft
    return _MOST_MATCHED * min(stack, _FULL_STACK) // _FULL_STACK


def _check_spaces(text: bytes) -> None:
    if _TWO_SPACES.search(text.decode(errors="replace")):
        raise TextTooLongError(
            "This text has a space beside other white space, at which llama.cpp would end the "
            "process with this model. Send single spaces."
        )


def _check_digits(text: bytes) -> None:
    if sum(len(run) ** 2 for run in _DIGITS.findall(text)) > _MOST_DIGIT_PAIRS:
        raise TextTooLongError(
            f"This text of {len(text)} bytes has long numbers; tokenizing it with this model would "
            "take too long. Divide them."
        )


def _check_searched(text: bytes, n_searched: NDArray[np.int64]) -> None:
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    if (n := int(counts @ n_searched)) > _MOST_COMPARED:
        raise TextTooLongError(
            f"This text of {len(text)} bytes may begin one of the model's special tokens in {n} "
            f"ways, the limit is {_MOST_COMPARED}: tokenizing it would take too long. Shorten it."
        )


def _check_matched(points: NDArray[np.uint32], pre: str | None) -> None:
    most = _most_matched()
    if (run := longest_run(points, pre, most)) > most:
        raise TextTooLongError(
            f"This text has {run} characters in a row of one kind (letters, digits, white space or "
            f"others), the limit with this model is {most}: llama.cpp cannot split longer ones. "
            "Divide them."
        )


def _check_run(text: bytes, points: NDArray[np.uint32], has_token: NDArray[np.bool_]) -> None:
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
    searched = [
        text[0]
        for token, text in enumerate(texts)
        if text and llama_cpp.llama_vocab_get_attr(vocab, token) & _SEARCHED
    ]
    n_searched = np.bincount(np.array(searched, np.int64), minlength=256)
    if not is_spm:
        return _Vocabulary(longest, n_searched, None)
    has_token = np.zeros(_N_CODE_POINTS, np.bool_)
    characters = (text.decode(errors="ignore") for text in texts)
    has_token[[ord(one) for one in characters if len(one) == 1]] = True
    has_token[_SPACE] |= has_token[_ESCAPED_SPACE]
    return _Vocabulary(longest, n_searched, has_token)
