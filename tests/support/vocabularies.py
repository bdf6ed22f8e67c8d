"""Files that have a vocabulary and nothing else."""

from __future__ import annotations

from llama_cpp import Llama

from llmaas_eval.models import finish, open_writer

LARGE = 1 << 20


def byte_tokens():
    """Return the 256 tokens of single bytes, as byte-level BPE vocabularies spell them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + n) for n in range(256 - len(shown)))
    return [chr(byte) if byte in shown else next(others) for byte in range(256)]


def opened_vocabulary(path, kind, tokens, types, **fields):
    """Write a file with these tokens, and return a ``Llama`` on it, which the caller closes."""
    writer = open_writer(path, "llama")
    for name, number in (("context_length", LARGE), ("embedding_length", 64)):
        writer.add_uint32(f"llama.{name}", number)
    for name in ("block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, found in fields.items():
        getattr(writer, f"add_{name}")(found)
    finish(writer, path)
    return Llama(str(path), n_ctx=LARGE, vocab_only=True, verbose=False)
