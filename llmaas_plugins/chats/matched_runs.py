r"""Runs of characters that llama.cpp's BPE tokenizers may match in one piece.

The expressions of all values of ``tokenizer.ggml.pre`` repeat only these classes of characters, in
which one piece may be as long as the text (``llm_tokenizer_bpe`` in llama.cpp). A character belongs
to every class that one of the expressions may count it to, so that no run is taken for shorter.
"""

from __future__ import annotations

import functools
import unicodedata

import numpy as np
from numpy.typing import NDArray

__all__ = ["longest_run"]

_N_POINTS, _BLOCK = 0x40100, 256
"""Size of the table; later code points have no characters, or private ones."""
_IS_KNOWN, _LETTER, _NUMBER, _OTHER, _BREAK, _SPACE = (1 << bit for bit in range(6))
_NOT_ASCII, _ASIAN_MARK, _NO_END, _WORD, _NOT_SPACE = (1 << bit for bit in range(6, 11))
_CLASSES = (
    _LETTER,  # [\p{L}\p{M}]+
    _NUMBER,  # \p{N}+
    _OTHER,  # [^\s\p{L}\p{N}]+, with _BREAK: [^\s\p{L}\p{N}]+[\r\n/]*
    _SPACE,  # \s+
    _NOT_ASCII,  # [一-龥ࠀ-一가-퟿]+ and other ranges of letters, digits, marks and symbols
    _ASIAN_MARK,  # Chinese and Japanese marks, with all of U+3001 to 303F
)
_MORE_CLASSES = {
    "exaone-moe": _WORD,  # (?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+
    "whitespace": _NOT_SPACE,  # \S+
    # all but white space, sentence punctuation, parentheses and bars
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat", "viking"), _NO_END),
}
_SPACES = frozenset([*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)])
_SPACES |= {0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
_ENDS = frozenset([*map(ord, ".,!?"), 0x2026, 0x3001, 0x3002, 0xFF0C, 0x0964, 0x06D4, 0x060C])
_SPLIT_FIRST = frozenset([0x3001, 0x3002, 0xFF0C, 0xFF01, 0xFF1F])
"""Chinese punctuation at which an earlier expression always splits, or that no range contains."""
_ASIAN_MARKS = frozenset(
    [
        0xFF01,
        0xFF0C,
        0xFF1A,
        0xFF1B,
        0x2026,
        0x2014,
        0x2018,
        0x2019,
        0x201C,
        0x201D,
        *range(0x3001, 0x3040),
        *range(0xFE30, 0xFE50),
    ]
)


def longest_run(points: NDArray[np.uint32], pre: str | None, most: int) -> int:
    """Return the most characters that llama.cpp may match in one piece, if more than ``most``.

    Args:
        points: Code points of the text.
        pre: Value of ``tokenizer.ggml.pre`` in the model's file.
        most: Shorter runs need not be measured, which saves nearly all of the time; 0 or less is
            returned for some of them.
    """
    found = _classes_of(points)
    # of two runs that are longer together, one covers a whole part of a quarter of the length
    parts = np.bitwise_and.reduceat(found, np.arange(0, len(found), max(most // 4, 1)))
    common = int(np.bitwise_or.reduce(parts))
    if common & (_OTHER | _BREAK):  # the longer run counts with the other, however short that is
        common |= _OTHER | _BREAK
    bits = [*_CLASSES, _BREAK, _MORE_CLASSES.get(pre or "", 0)]
    runs = {bit: _longest(found & bit != 0) for bit in bits if common & bit}
    with_breaks = sum(runs.get(bit, 0) for bit in (_OTHER, _BREAK))
    return max(with_breaks, *runs.values(), 0)


def _classes_of(points: NDArray[np.uint32]) -> NDArray[np.uint16]:
    points = np.minimum(points, _N_POINTS - 1)
    classes = _table()
    is_used = np.zeros(_N_POINTS // _BLOCK, np.bool_)
    is_used[points // _BLOCK] = True
    for block in np.flatnonzero(is_used):
        first = int(block) * _BLOCK
        if not classes[first] & _IS_KNOWN:
            classes[first : first + _BLOCK] = [_class(one) for one in range(first, first + _BLOCK)]
    return classes[points]


@functools.cache
def _table() -> NDArray[np.uint16]:
    """Return the table of classes, which is filled as texts need it."""
    return np.zeros(_N_POINTS, np.uint16)


def _longest(is_member: NDArray[np.bool_]) -> int:
    ends = np.flatnonzero(~is_member)
    return int(np.diff(ends, prepend=-1, append=len(is_member)).max()) - 1


def _class(point: int) -> int:
    """Return the classes that a code point may belong to, as bits."""
    bits = _IS_KNOWN
    if point in _SPACES:
        bits |= _WORD if point == ord(" ") else 0
        return bits | _SPACE | (_BREAK if point in (10, 13) else 0)
    bits |= _NOT_SPACE | _of_category(chr(point)) | (_BREAK if point == ord("/") else 0)
    if point >= 0x80 and point not in _SPLIT_FIRST:
        bits |= _NOT_ASCII
    if point in _ASIAN_MARKS:
        bits |= _ASIAN_MARK
    return bits if point in _ENDS else bits | _NO_END


def _of_category(character: str) -> int:
    """Return the classes of a character's category.

    Python and llama.cpp may know different versions of Unicode, so a character that came, or whose
    category changed, after the old version in Python's library may belong to each class.
    """
    before, category = unicodedata.ucd_3_2_0.category(character), unicodedata.category(character)
    if before == "Cn" or before[0] != category[0]:
        return _LETTER | _WORD | _NUMBER | _OTHER
    kinds = {"L": _LETTER | _WORD, "N": _NUMBER, "M": _LETTER | _WORD | _OTHER}
    return kinds.get(category[0], _OTHER)
