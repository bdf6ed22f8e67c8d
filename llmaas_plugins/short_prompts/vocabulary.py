"""Texts of a model's tokens, and facts that divide and protect words."""

from __future__ import annotations

import ctypes
import re
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from llmaas_hooks import LlmaasError, Tokens

__all__ = ["Fact", "Vocabulary", "vocabulary_of"]

_BYTES = 64
"""Bytes that suffice for nearly every token."""
_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
_LISTED = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_UNKNOWN = llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN | llama_cpp.LLAMA_TOKEN_ATTR_UNUSED
_FIM_MARKS = (
    llama_cpp.llama_vocab_fim_pre,
    llama_cpp.llama_vocab_fim_suf,
    llama_cpp.llama_vocab_fim_mid,
)
"""Functions that return the marks of the prefix, the suffix and the gap."""
_LIKE_A_MARK = re.compile(rb"<[|\xef][^<>\s]{1,40}>|\[/?[A-Z_]{3,30}\]")
"""Marks of chat templates that some files list among the words, ``<|user|>`` for one."""
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""Characters of scripts that put no blanks between words."""
_UNSPACED_LEADS = range(0xE4, 0xEA)
"""First bytes of characters all of which are such ones."""
_CONTINUATION = range(0x80, 0xC0)
"""Bytes in the middle of a UTF-8 character."""
_CLOSING = "\"'”\u2019»)]}*_`"
_ENDS = ".!?:…。\uff01\uff1f\uff1a"
_SYMBOL = re.compile(r"[_/\\@#$=<>(){}\[\]+|~^]|[.:-][\w.:-]|[^\W\d_][A-Z]")
"""Characters that words of code, addresses and paths have."""
_POINT = re.compile(r"[.:-]")
"""Characters that also end words of other texts."""


class Fact:
    """Bits of the facts about a token, and about a word: those of all its tokens.

    Attributes:
        TEXT: It has a character that is no blank.
        BLANK_START: It begins with a blank.
        BLANK_END: It ends with a blank.
        LINE: It has a line end.
        MARK: It is no text but a control token, or another mark of a chat template.
        ALONE: It is a word of its own: a mark, or a token without a known text.
        INSIDE: It begins in the middle of a character.
        UNSPACED_START, UNSPACED_END: It begins, or ends, in a script without blanks.
        LETTER: It has a letter.
        CAPITAL: The first letter is a capital one.
        DIGIT: It has a digit.
        SYMBOL: It may be code, an address or a path.
        POINT: It may be so if it does not end the word.
        INNER: It has a capital letter after another token of its word, or a point before one.
        QUOTE: It has a quotation mark.
        TICK: It has a backtick or a tilde.
        CLOSING: It has only closing marks, such as quotation marks, or blanks.
        STOP: It ends a sentence, apart from closing marks.
    """

    TEXT = 1 << 0
    BLANK_START = 1 << 1
    BLANK_END = 1 << 2
    LINE = 1 << 3
    MARK = 1 << 4
    ALONE = 1 << 5
    INSIDE = 1 << 6
    UNSPACED_START = 1 << 7
    UNSPACED_END = 1 << 8
    LETTER = 1 << 9
    CAPITAL = 1 << 10
    DIGIT = 1 << 11
    SYMBOL = 1 << 12
    QUOTE = 1 << 13
    TICK = 1 << 14
    CLOSING = 1 << 15
    STOP = 1 << 16
    POINT = 1 << 17
    INNER = 1 << 18


class Vocabulary:
    """Texts of a model's tokens. They are read when a prompt has them, so no request waits long."""

    def __init__(self, vocab: Any) -> None:
        """Read nothing yet of a ``llama_vocab``, whose model must exist as long as this is used."""
        self._vocab = vocab
        self._has_texts = llama_cpp.llama_vocab_type(vocab) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        self.n_tokens = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self._pieces: list[bytes] = [b""] * self.n_tokens
        self._marks: dict[int, str] = {}
        self._facts, self._lengths = np.zeros((2, self.n_tokens), np.int32)
        self._is_known = np.zeros(self.n_tokens, np.bool_)
        self._fim = {int(mark(vocab)) for mark in _FIM_MARKS} - {llama_cpp.LLAMA_TOKEN_NULL}

    def fills_gap(self, tokens: Tokens) -> bool:
        """Return whether a prompt asks for the text between two others (fill in the middle)."""
        return bool(self._fim) and bool(np.isin(tokens, list(self._fim)).any())

    def facts(self, tokens: Tokens) -> NDArray[np.int32]:
        """Return the facts about each token, shape ``(n,)``.

        Raises:
            ValueError: A number is no token of the model.
        """
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.n_tokens:
            raise ValueError(
                f"tokens must be from 0 to {self.n_tokens - 1}, found {int(tokens.min())} to "
                f"{int(tokens.max())}"
            )
        is_known = self._is_known[tokens]
        if not is_known.all():
            for token in np.unique(tokens[~is_known]).tolist():
                self._learn(token)
        return self._facts[tokens]

    def pieces(self, tokens: Tokens) -> list[bytes]:
        """Return each token's bytes; none for a mark. ``facts`` was asked about them before."""
        return list(map(self._pieces.__getitem__, tokens.tolist()))

    def lengths(self, tokens: Tokens) -> NDArray[np.int32]:
        """Return the number of each token's bytes, shape ``(n,)``; ``facts`` came before."""
        return self._lengths[tokens]

    def mark(self, token: int) -> str:
        """Return how a mark is written, such as ``<|user|>``; empty for other tokens."""
        return self._marks.get(token, "")

    # -- inside ---------------------------------------------------------------------------------

    def _learn(self, token: int) -> None:
        facts = self._read(token) if self._has_texts else Fact.TEXT | Fact.ALONE
        self._facts[token] = facts
        self._is_known[token] = True  # last: another thread may be reading

    def _read(self, token: int) -> int:
        """Read a token's text, and return the facts about it."""
        attributes = llama_cpp.llama_vocab_get_attr(self._vocab, token)
        if attributes & _UNKNOWN:
            return Fact.TEXT | Fact.ALONE
        piece = self._piece(token)
        if attributes & _CONTROL or (attributes & _LISTED and _LIKE_A_MARK.fullmatch(piece)):
            self._marks[token] = piece.decode(errors="replace")
            return Fact.MARK | Fact.ALONE
        self._pieces[token], self._lengths[token] = piece, len(piece)
        return _facts(piece)

    def _piece(self, token: int) -> bytes:
        """Return a token's bytes, those of control tokens as they are written."""
        buffer = ctypes.create_string_buffer(_BYTES)
        args = self._vocab, token
        n = llama_cpp.llama_token_to_piece(*args, buffer, _BYTES, 0, True)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = llama_cpp.llama_token_to_piece(*args, buffer, -n, 0, True)
        return buffer.raw[: max(n, 0)]


_vocabularies: WeakKeyDictionary[Any, tuple[Any, Vocabulary]] = WeakKeyDictionary()


def vocabulary_of(llama: Any) -> Vocabulary:
    """Return the vocabulary of a ``llama_cpp.Llama``; the same one as long as its model is loaded.

    Raises:
        LlmaasError: The object was closed.
    """
    model = llama.model
    if model is None:
        raise LlmaasError("the Llama object was closed, so its model has no vocabulary any more")
    known, found = _vocabularies.get(llama, (None, None))
    if found is None or known is not model:  # each load has a handle, even at an earlier address
        found = Vocabulary(llama_cpp.llama_model_get_vocab(model))
        _vocabularies[llama] = model, found
    return found


def _facts(piece: bytes) -> int:
    """Return the facts about a token that is text."""
    if not piece:
        return 0
    facts = 0
    if piece[0] in _CONTINUATION:
        facts |= Fact.INSIDE
    if piece[0] in _UNSPACED_LEADS:
        facts |= Fact.UNSPACED_START
    text = piece.decode(errors="replace")
    core = text.strip()
    facts |= _blanks(text)
    if not core:
        return facts
    facts |= Fact.TEXT
    if _UNSPACED.match(text[0]):
        facts |= Fact.UNSPACED_START
    if _UNSPACED.match(text[-1]):
        facts |= Fact.UNSPACED_END
    return facts | _letters(core) | _signs(core)


def _blanks(text: str) -> int:
    facts = 0
    if text[0].isspace():
        facts |= Fact.BLANK_START
    if text[-1].isspace():
        facts |= Fact.BLANK_END
    return facts | Fact.LINE if "\n" in text else facts


def _letters(core: str) -> int:
    facts = 0
    letter = next(filter(str.isalpha, core), "")
    if letter:
        facts |= Fact.LETTER
    if letter.isupper():
        facts |= Fact.CAPITAL
    if any(map(str.isdigit, core)):
        facts |= Fact.DIGIT
    return facts


def _signs(core: str) -> int:
    facts = 0
    if _SYMBOL.search(core):
        facts |= Fact.SYMBOL
    if _POINT.search(core):
        facts |= Fact.POINT
    if any(sign in core for sign in '"“”«»„'):
        facts |= Fact.QUOTE
    if "`" in core or "~" in core:
        facts |= Fact.TICK
    rest = core.rstrip(_CLOSING)
    if not rest:
        facts |= Fact.CLOSING
    elif rest[-1] in _ENDS:
        facts |= Fact.STOP
    return facts
