"""Replacement of the two llama_cpp functions that handle a client's grammar or schema."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from llama_cpp import _internals, llama_cpp, llama_grammar

from llmaas_plugins.server.grammars import Grammars, Running
from llmaas_plugins.server.refusal import Refusal

__all__ = ["confine_grammars"]


class _Sampler(_internals.CustomSampler):
    """A link in llama.cpp's sampler chain for a grammar that runs in another process."""

    def __init__(self, running: Running) -> None:
        super().__init__(running.apply)
        self._accept = llama_cpp.llama_sampler_i_accept(lambda _, token: running.accept(token))
        self.sampler.iface.contents.accept = self._accept


def confine_grammars(grammars: Grammars, refuse: Callable[[Refusal], NoReturn]) -> None:
    """Make llama_cpp convert schemas and run grammars only through ``grammars``.

    Args:
        grammars: Converter and runner of grammars in another process.
        refuse: Function that ends the running call.
    """

    def convert(schema: str, prop_order: list[str] | None = None) -> str:
        del prop_order  # no caller passes any
        try:
            return grammars.converted(schema)
        except Refusal as refusal:
            refuse(refusal)

    def add_grammar(chain: Any, _model: Any, grammar: Any) -> None:
        if not grammar._grammar:
            return
        try:
            running = grammars.run(grammar._grammar)
        except Refusal as refusal:
            refuse(refusal)
        sampler = _Sampler(running)
        llama_cpp.llama_sampler_chain_add(chain.sampler, sampler.get_sampler())
        place = llama_cpp.llama_sampler_chain_n(chain.sampler) - 1
        chain.custom_samplers.append((place, sampler))
        chain._exit_stack.callback(running.close)
        chain.sample = functools.partial(sample, chain.sample, running)

    def sample(inner: Callable[..., int], running: Running, *args: Any, **kwargs: Any) -> int:
        try:
            running.prepare()
        except Refusal as refusal:
            refuse(refusal)
        return inner(*args, **kwargs)

    llama_grammar.json_schema_to_gbnf = convert
    _internals.LlamaSampler.add_grammar = add_grammar
