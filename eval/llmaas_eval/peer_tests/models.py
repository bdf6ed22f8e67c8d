"""Generated models that replace the models that the tests download.

They have random weights, like ``llmaas_eval.families``, with two exceptions. Their vocabulary has
the tokens that the tests name. Some tokens have a *successor* to which their embedding points, so
that the models write the text that the tests expect of the real ones. Otherwise the logits depend
on all cells of the context.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter, TokenType
from numpy.typing import NDArray

from llmaas_eval.families import write_family
from llmaas_eval.models import copy_field, finish, open_writer

__all__ = ["DOWNLOADS", "KINDS", "SPLIT", "write_models"]

KINDS = {"transformer": "llama", "recurrent": "mamba2", "hybrid": "granitehybrid"}
"""Families to run the tests on, by llama.cpp's name for the kind of model."""
SPLIT = "-split"
"""Suffix of models that split one more word: prompts then fill a chunk and still fit 32 cells."""
DOWNLOADS = {
    "ggml-org/models": "transformer-spelled",
    "QuantFactory/mamba-130m-hf-GGUF": "recurrent-spelled",
    "tiiuae/Falcon-H1-Tiny-90M-Instruct-GGUF": "hybrid-spelled",
    "CompendiumLabs/bge-small-en-v1.5-gguf": "embedding",
}
"""Model that replaces each Hugging Face repository for which the tests need a certain kind."""

_N_VOCAB = 9472
_ANSWERS = ("Ġjumps", "Ġover", "Ġthe", "Ġlazy", "Ġdog", "Ġworld", "Hello", "true", "rot")
_PANGRAM = ("The", "ĠThe", "Ġbrown", "Ġfox")
_QUESTIONS = ("Ġcapital", "Ġof", "Ġfrance", "Ġis", "Ġparis", "Ġor", "Ġnumber", "Ġfrom", "Ġto")
_VOCABULARIES = {
    "": (*_ANSWERS, *_QUESTIONS, *_PANGRAM, "Ġquick"),
    SPLIT: (*_ANSWERS, *_QUESTIONS, *_PANGRAM),
    "-spelled": _ANSWERS,
}
"""Words that are one token, by suffix; other words are spelled letter by letter.

Chunks have 16 tokens, so longer prompts test more.
"""
_IDS = {"Hello": 9419, "Ġworld": 1814}
_END = "<|endoftext|>"
_SUCCESSORS = {
    "Ġfox": "Ġjumps",
    "x": "Ġjumps",
    "Ġjumps": "Ġover",
    "Ġover": "Ġthe",
    "Ġthe": "Ġlazy",
    "Ġlazy": "Ġdog",
    "Ġdog": ".",
    "Ċ": "true",
    "Ġpar": "rot",
}
_SEED = 2  # a test expects two random numbers to differ; with this seed they do
_EMBEDDING_STD, _OUTPUT_STD = 4.0, 0.1  # for layers of about 1 and logits of about 16


def write_models(folder: Path) -> None:
    """Create ``folder`` and write every model that the tests need into it."""
    folder.mkdir()
    write_family("bert", folder / "embedding.gguf")
    for kind, family in KINDS.items():
        plain = GGUFReader(write_family(family, folder / "plain.gguf"))
        for ending, words in _VOCABULARIES.items():
            _write_revoiced(plain, folder / f"{kind}{ending}.gguf", words)
    (folder / "plain.gguf").unlink()


def _bytes() -> list[str]:
    """Return byte-level BPE's characters: printable bytes as they are, others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(shown))
    return [chr(byte) for byte in shown] + [chr(0x100 + i) for i in range(len(hidden))]


def _pairs(words: Iterable[str]) -> list[tuple[str, str]]:
    """Return the BPE merges that build each word from its first letter, one letter at a time.

    Words that begin with a space come first, so that they merge first.
    """
    ordered = sorted(words, key=lambda word: not word.startswith("Ġ"))
    return list(dict.fromkeys((w[:i], w[i]) for w in ordered for i in range(1, len(w))))


@functools.cache
def _tokens() -> list[str]:
    tokens = _bytes() + [left + right for left, right in _pairs(_VOCABULARIES[""])]
    tokens += [f"<{i}>" for i in range(len(tokens), _N_VOCAB - 1)]
    for token, at in _IDS.items():
        other = tokens.index(token)
        tokens[at], tokens[other] = tokens[other], tokens[at]
    return [*tokens, _END]


@functools.cache
def _ends(width: int) -> Mapping[str, NDArray[np.float16]]:
    """Return the embedding and the output matrix, which lead each token to its successor."""
    tokens, rng = _tokens(), np.random.default_rng(_SEED)
    noise = rng.standard_normal((2, len(tokens), width), dtype=np.float32)
    embedding, output = _EMBEDDING_STD * noise[0], _OUTPUT_STD * noise[1]
    for token, successor in _SUCCESSORS.items():
        row = embedding[tokens.index(token)]
        output[tokens.index(successor)] += row / np.linalg.norm(row)
    ends = {"token_embd.weight": embedding, "output.weight": output}
    return {name: values.astype(np.float16) for name, values in ends.items()}


def _write_revoiced(plain: GGUFReader, path: Path, words: Iterable[str]) -> None:
    """Write ``plain`` with another vocabulary and with matching embedding and output matrices."""
    arch = plain.fields["general.architecture"].contents()
    writer = open_writer(path, arch)
    for key, entry in plain.fields.items():
        if not key.startswith(("GGUF.", "tokenizer.", "general.architecture", f"{arch}.vocab")):
            copy_field(writer, entry)
    _add_vocabulary(writer, _tokens(), words)
    ends = _ends(plain.fields[f"{arch}.embedding_length"].contents())
    for name, values in ends.items():
        writer.add_tensor(name, values)
    for tensor in plain.tensors:
        if tensor.name not in ends:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer, path)


def _add_vocabulary(writer: GGUFWriter, tokens: list[str], words: Iterable[str]) -> None:
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token == _END else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([f"{left} {right}" for left, right in _pairs(words)])
    writer.add_bos_token_id(tokens.index(_END))
    writer.add_eos_token_id(tokens.index(_END))
    writer.add_add_bos_token(False)
