"""Replacements that spare thousands of tests the time for what gives the same result each time."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import numpy as np
from gguf import GGUFReader
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmaas_patches import patcher, table


def changes():
    """Yield each owner with the name of its attribute and the replacement."""
    yield patcher, "sys", SimpleNamespace(modules=_Searched())
    yield ImmutableSandboxedEnvironment, "compile", _compiled_once()
    yield GGUFReader, "data", property(_data, _set_data)


class _Searched:
    """The modules that an activation searches for functions of llama_cpp imported by name.

    The clients and all tests are 3500 modules, for which each activation would need 20 ms. Those
    that have no such function when the first test begins are not searched again.
    """

    def __init__(self):
        targets = [patch.target for patch in table.PATCHES if patch.applies]
        originals = {id(inspect.getattr_static(*patcher.resolve(target))) for target in targets}
        self._others = {
            name: module
            for name, module in sys.modules.items()
            if originals.isdisjoint(map(id, getattr(module, "__dict__", {}).values()))
        }

    def values(self):
        found = sys.modules.items()
        return [module for name, module in found if self._others.get(name) is not module]


def _compiled_once():
    """Return a method that compiles a chat template once. Each ``Llama`` would need 3 ms for it."""
    compile_, compiled = ImmutableSandboxedEnvironment.compile, {}

    def compiled_once(self, source, *args, **kwargs):
        options = self.trim_blocks, self.lstrip_blocks, *self.extensions, *self.filters
        key = source, *options, args, *kwargs.items()
        if key not in compiled:
            compiled[key] = compile_(self, source, *args, **kwargs)
        return compiled[key]

    return compiled_once


def _data(self):
    return self._plain


def _set_data(self, mapped):
    """Slice a file that is only read as a plain array.

    A reader of the packaged model takes slices for each token of the vocabulary: as memory maps,
    they would need 200 ms, which is three times as much.
    """
    self._plain = mapped if mapped.flags.writeable else np.asarray(mapped)
