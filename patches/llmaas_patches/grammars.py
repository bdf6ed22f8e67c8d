"""Grammars of llama-cpp-python: their text, and functions that take the place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_cpp import _internals, llama_cpp, llama_grammar

__all__ = ["SamplerLink", "call_at_close", "grammar_text", "replace_grammars"]


class SamplerLink(_internals.CustomSampler):
    """A link in llama.cpp's sampler chain that two functions make up."""

    def __init__(self, apply: Callable[[Any], None], accept: Callable[[int], None]) -> None:
        """Take the function that edits candidates, and the one that gets each sampled token."""
        super().__init__(apply)
        self._accept = llama_cpp.llama_sampler_i_accept(lambda _, token: accept(token))
        self.sampler.iface.contents.accept = self._accept


def call_at_close(chain: Any, function: Callable[[], None]) -> None:
    """Call ``function`` when a sampler chain is closed."""
    chain._exit_stack.callback(function)


def grammar_text(grammar: Any) -> str:
    """Return the text of a ``LlamaGrammar``; an empty string if it has none."""
    return str(getattr(grammar, "_grammar", "") or "")


def replace_grammars(
    convert: Callable[..., str], add_grammar: Callable[[Any, Any, Any], None]
) -> None:
    """Replace the functions that convert a schema, and that add a grammar to a sampler chain."""
    llama_grammar.json_schema_to_gbnf = convert
    _internals.LlamaSampler.add_grammar = add_grammar
