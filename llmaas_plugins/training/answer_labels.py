"""Labels of the user's own model: which words of a prompt its answer depends on.

A word's weight is the change of the answer's log-likelihood, to first order, if its embeddings
became zero: the gradient times the embedding, summed over the word's tokens. One backward pass
gives the weights of all words of a prompt.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from llama_cpp import llama_cpp
from numpy.typing import NDArray
from torch import Tensor

from llmaas_hooks import ConfigError
from llmaas_plugins.elastic.torch_model import Decoder
from llmaas_plugins.short_prompts.encoder.labels import largest, words_of
from llmaas_plugins.training.word_labels import Labeled

__all__ = ["N_ANSWER", "N_PROMPT", "Part", "labeled", "parts_of", "saliencies", "seconds"]

N_PROMPT, N_ANSWER = 192, 16
"""Tokens of a prompt, and of the answer to it."""
_AT_ONCE = 4
"""Prompts whose layers are computed together."""
_LEAST_WORDS, _MOST_PIECE = 8, 1024


class Part(NamedTuple):
    """Part of a text that serves as a prompt.

    Attributes:
        words: Words of the part, each with the blanks before it.
        tokens: Tokens of the part, with those that a text begins with.
        places: Word of each token; -1 for a token that belongs to none.
    """

    words: Sequence[str]
    tokens: NDArray[np.int32]
    places: NDArray[np.intp]


class Progress(Protocol):
    """Results by name that an earlier run may have kept."""

    def get(self, name: str) -> NDArray[Any] | None:
        """Return a result, or None if it is not known."""

    def keep(self, results: Mapping[str, NDArray[Any]]) -> None:
        """Keep results together."""


def parts_of(texts: Sequence[str], llama: Any, n_parts: int, seed: int = 0) -> list[Part]:
    """Cut whole words of ``N_PROMPT`` tokens or less from texts, in random order.

    Args:
        texts: The texts.
        llama: A ``llama_cpp.Llama`` that divides them into tokens.
        n_parts: Most parts to return.
        seed: Seed of the order.

    Raises:
        ConfigError: The texts have no part of eight words.
    """
    chunks = [
        words[at : at + N_PROMPT]
        for words in map(words_of, texts)
        for at in range(0, len(words), N_PROMPT)
    ]
    order = np.random.default_rng(seed).permutation(len(chunks))
    found = (_part(chunks[i], llama) for i in order)
    parts = list(itertools.islice((p for p in found if len(p.words) >= _LEAST_WORDS), n_parts))
    if not parts:
        raise ConfigError("the texts have no eight words in a row. Give more with `--text FILE`.")
    return parts


def labeled(  # noqa: PLR0913 -- what is read, by whom, how, and where it is kept and told
    parts: Sequence[Part],
    llama: Any,
    decoder: Decoder,
    share: float,
    *,
    kept: Progress,
    progress: Callable[[int], object] = lambda _n: None,
) -> Iterator[Labeled]:
    """Yield parts whose words are labeled by what the model's answers depend on.

    Args:
        parts: Parts of texts.
        llama: The model in llama.cpp, which answers.
        decoder: The model in torch, which computes gradients.
        share: Share of the words to keep.
        kept: Place of the weights that are complete.
        progress: Function that is told of each number of parts that are done.
    """
    for start in range(0, len(parts), _AT_ONCE):
        some = parts[start : start + _AT_ONCE]
        weights = kept.get(f"weights {start}")
        n = max(len(part.tokens) for part in some)
        if weights is None or weights.shape != (len(some), n):
            answers = [_answer(llama, part.tokens) for part in some]
            weights = np.zeros((len(some), n), np.float32)
            for row, part, answer in zip(weights, some, answers, strict=True):
                row[: len(part.tokens)] = saliencies(decoder, part.tokens, answer)
            kept.keep({f"weights {start}": weights})
        for part, row in zip(some, weights, strict=True):
            own = np.zeros(len(part.words) + 1, np.float32)
            np.add.at(own, part.places, row[: len(part.tokens)])
            yield Labeled(part.words, largest(np.abs(own[:-1]), share))
        progress(len(some))


def seconds(parts: Sequence[Part], llama: Any, decoder: Decoder) -> float:
    """Return about how many seconds a part takes: the second one of two that are alike."""
    times = list[float]()
    for part in (parts[0], parts[0]):
        started = time.monotonic()
        saliencies(decoder, part.tokens, _answer(llama, part.tokens))
        times.append(time.monotonic() - started)
    return times[1]


def saliencies(
    decoder: Decoder, prompt: NDArray[np.int32], answer: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Return the gradient times the embedding of each token of a prompt, shape ``(n_prompt,)``.

    Only the inputs of the layers are kept, and each layer is computed a second time.

    Args:
        decoder: The model.
        prompt: Tokens of the prompt.
        answer: Tokens whose log-likelihood is asked for; one or more.
    """
    window = np.concatenate([prompt, answer])[None, :-1]
    inputs = [decoder.embed(window)[0]]
    for layer in range(decoder.blocks.n_layers):
        inputs.append(decoder.apply(layer, inputs[-1][None])[0])
    slope, first = torch.zeros_like(inputs[-1]), len(prompt) - 1
    slope[first:] = decoder.loss_gradient(
        inputs.pop()[first:], torch.from_numpy(answer).long().to(slope.device)
    )
    for layer in reversed(range(decoder.blocks.n_layers)):
        slope = _through(decoder, layer, inputs[layer], slope)
    found: NDArray[np.float32] = (slope * inputs[0]).sum(-1)[: len(prompt)].detach().cpu().numpy()
    return found


# -- inside --------------------------------------------------------------------------------------


def _through(decoder: Decoder, layer: int, x: Tensor, slope: Tensor) -> Tensor:
    """Return the gradient of a layer's input, from that of its output."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = decoder.block(layer, decoder.weights(layer), x)
    (found,) = torch.autograd.grad(y, x, slope)
    return found


def _answer(llama: Any, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the model's greedy answer; it may end with the token that ends texts."""
    found = list[int]()
    for token in llama.generate(prompt.tolist(), temp=0.0):
        found.append(int(token))
        if len(found) == N_ANSWER or token == llama.token_eos():
            break
    return np.array(found, np.int32)


def _part(words: Sequence[str], llama: Any) -> Part:
    """Divide words into tokens, as many as fit; find the word to which each token belongs."""
    texts = [word.encode("utf-8", "replace") for word in words]
    whole = b"".join(texts)
    tokens = llama.tokenize(whole, True, False)[:N_PROMPT]
    pieces = [_piece(llama, token) for token in tokens]
    added = not whole.startswith(b"".join(pieces))  # a blank, by some tokenizers
    ends, last = np.cumsum(list(map(len, texts))), np.cumsum(list(map(len, pieces))) - 1 - added
    n_words = int(np.searchsorted(ends, last[-1] + 1, "right"))  # the last one may be cut
    places = np.searchsorted(ends, last, "right")
    is_none = np.array([not piece for piece in pieces]) | (last < 0) | (places >= n_words)
    places[is_none] = -1
    return Part(words[:n_words], np.array(tokens, np.int32), places)


def _piece(llama: Any, token: int) -> bytes:
    """Return the text of a token; none for one that begins or ends a text."""
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    room = ctypes.create_string_buffer(_MOST_PIECE)
    n = llama_cpp.llama_token_to_piece(vocab, token, room, _MOST_PIECE, 0, False)
    return room.raw[: max(n, 0)]
