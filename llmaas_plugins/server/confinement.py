"""Replacement of the two llama_cpp functions that handle a client's grammar or schema."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from llama_cpp import llama_cpp

from llmaas_patches.grammars import (
    SamplerLink,
    call_at_close,
    grammar_text,
    replace_grammars,
)
from llmaas_plugins.server.calls import Call
from llmaas_plugins.server.grammars import Grammars, Running
from llmaas_plugins.server.refusal import Refusal

__all__ = ["confine_grammars"]


def confine_grammars(
    grammars: Grammars,
    refuse: Callable[[Refusal], NoReturn],
    running_call: Callable[[], Call | None],
) -> None:
    """Make llama_cpp convert schemas and run grammars only through ``grammars``.

    Args:
        grammars: Converter and runner of grammars in another process.
        refuse: Function that ends the running call.
        running_call: Function that returns the running call, at whose end its grammar ends.
    """

    def convert(schema: str, prop_order: list[str] | None = None) -> str:
        del prop_order  # no caller passes any
        try:
            return grammars.converted(schema)
        except Refusal as refusal:
            refuse(refusal)

    def add_grammar(chain: Any, _model: Any, grammar: Any) -> None:
        text = grammar_text(grammar)
        if not text:
            return
        try:
            running = grammars.run(text)
        except Refusal as refusal:
            refuse(refusal)
        if (call := running_call()) is not None:  # llama_cpp keeps samplers long
            call.constrain(running)
        sampler = SamplerLink(running.apply, running.accept)
        llama_cpp.llama_sampler_chain_add(chain.sampler, sampler.get_sampler())
        place = llama_cpp.llama_sampler_chain_n(chain.sampler) - 1
        chain.custom_samplers.append((place, sampler))
        call_at_close(chain, running.close)
        chain.sample = functools.partial(sample, chain.sample, running)

    def sample(inner: Callable[..., int], running: Running, *args: Any, **kwargs: Any) -> int:
        try:
            running.prepare()
        except Refusal as refusal:
            refuse(refusal)
        return inner(*args, **kwargs)

    replace_grammars(convert, add_grammar)
