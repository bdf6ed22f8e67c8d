"""Models in place of those that the tests download.

They are of random weights, like ``llmaas_eval.families``, but for two things. Their vocabulary has
the tokens that the tests name, and each token that matters has a *successor* which its embedding
points to, so that they say what the tests expect of the real ones. Everything else about their
logits depends on all cells of the context.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter, TokenType

from llmaas_eval.families import write_family
from llmaas_eval.models import finish, open_writer

__all__ = ["DOWNLOADS", "KINDS", "SPLIT", "write_models"]

KINDS = {"transformer": "llama", "recurrent": "mamba2", "hybrid": "granitehybrid"}
"""Families the suite runs on, by what llama.cpp calls them."""
SPLIT = "-split"
"""Ending of the names of models that split a word: prompts then fill a chunk, and fit 32 cells."""
DOWNLOADS = {
    "ggml-org/models": "transformer-spelled",
    "QuantFactory/mamba-130m-hf-GGUF": "recurrent-spelled",
    "tiiuae/Falcon-H1-Tiny-90M-Instruct-GGUF": "hybrid-spelled",
    "CompendiumLabs/bge-small-en-v1.5-gguf": "embedding",
}
"""Which model stands for which repository of the hub, where the tests say what kind it is."""

_N_VOCAB = 9472
_ANSWERS = ("Ġjumps", "Ġover", "Ġthe", "Ġlazy", "Ġdog", "Ġworld", "Hello", "true", "rot")
_PANGRAM = ("The", "ĠThe", "Ġbrown", "Ġfox")
_QUESTIONS = ("Ġcapital", "Ġof", "Ġfrance", "Ġis", "Ġparis", "Ġor", "Ġnumber", "Ġfrom", "Ġto")
_VOCABULARIES = {
    "": (*_ANSWERS, *_QUESTIONS, *_PANGRAM, "Ġquick"),
    SPLIT: (*_ANSWERS, *_QUESTIONS, *_PANGRAM),
    "-spelled": _ANSWERS,
}
"""Words that are one token; the others are spelled. Chunks have 16 tokens, so longer is better."""
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
_SEED = 2  # one of those with which two numbers that a test draws differ, as it expects
_EMBEDDING_STD, _OUTPUT_STD = 4.0, 0.1  # beside layers of about 1, logits of about 16


def write_models(folder: Path) -> None:
    """Write every model the tests need into ``folder``, which is made."""
    folder.mkdir()
    write_family("bert", folder / "embedding.gguf")
    tokens = _tokens()
    for kind, family in KINDS.items():
        plain = write_family(family, folder / "plain.gguf")
        for ending, words in _VOCABULARIES.items():
            _revoice(plain, folder / f"{kind}{ending}.gguf", tokens, _merges(words))
        plain.unlink()


def _bytes() -> list[str]:
    """How byte-level BPE writes bytes: printable ones as they are, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(shown))
    return [chr(byte) for byte in shown] + [chr(0x100 + i) for i in range(len(hidden))]


def _pairs(words: Iterable[str]) -> list[tuple[str, str]]:
    """Each word grows from its first letter. Words with a space come first: they merge first."""
    ordered = sorted(words, key=lambda word: not word.startswith("Ġ"))
    return list(dict.fromkeys((w[:i], w[i]) for w in ordered for i in range(1, len(w))))


def _merges(words: Iterable[str]) -> list[str]:
    return [f"{left} {right}" for left, right in _pairs(words)]


def _tokens() -> list[str]:
    tokens = _bytes() + [left + right for left, right in _pairs(_VOCABULARIES[""])]
    tokens += [f"<{i}>" for i in range(len(tokens), _N_VOCAB - 1)]
    for token, at in _IDS.items():
        other = tokens.index(token)
        tokens[at], tokens[other] = tokens[other], tokens[at]
    return [*tokens, _END]


def _revoice(plain: Path, path: Path, tokens: list[str], merges: list[str]) -> None:
    """``plain`` with another vocabulary, and with embeddings and outputs that know successors."""
    reader = GGUFReader(plain)
    arch = reader.fields["general.architecture"].contents()
    writer = open_writer(path, arch)
    for key, entry in reader.fields.items():
        if not key.startswith(("GGUF.", "tokenizer.", "general.architecture", f"{arch}.vocab")):
            kind, sub = (*entry.types, None)[:2]
            writer.add_key_value(key, entry.contents(), kind, sub)
    _add_vocabulary(writer, tokens, merges)
    rng = np.random.default_rng(_SEED)
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            shape = (len(tokens), int(tensor.shape[0]))
            embedding = rng.normal(0, _EMBEDDING_STD, shape).astype(np.float32)
            output = rng.normal(0, _OUTPUT_STD, shape).astype(np.float32)
            for token, successor in _SUCCESSORS.items():
                row = embedding[tokens.index(token)]
                output[tokens.index(successor)] += row / np.linalg.norm(row)
            writer.add_tensor("token_embd.weight", embedding.astype(np.float16))
            writer.add_tensor("output.weight", output.astype(np.float16))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer, path)


def _add_vocabulary(writer: GGUFWriter, tokens: list[str], merges: list[str]) -> None:
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token == _END else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(_END))
    writer.add_eos_token_id(tokens.index(_END))
    writer.add_add_bos_token(False)
