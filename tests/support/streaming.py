"""A plugin that streams a model with a fixed number of kept bytes, whatever the process takes."""

from __future__ import annotations

import re
from pathlib import Path

from llama_cpp import llama_cpp
from packed_models import pack

from llmaas_hooks import WeightClaim, hookimpl
from llmaas_plugins.model.digest import files_now

ARENA = 1 << 20


class Streamer:
    """Reads all matrices of prepared models from their packed files, but for what it keeps.

    Attributes:
        contexts: Contexts made so far.
    """

    def __init__(self, kept):
        self.kept, self.contexts = kept, []

    @hookimpl
    def llmaas_weights(self, load, tensors):
        packed = pack(Path(load.path))
        load.params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        names = "|".join(re.escape(name) for name, info in tensors.items() if info.is_matrix)
        (file,) = files_now(packed)
        return [WeightClaim(names, source="file", path=file.path, stamp=file.stamp)]

    @hookimpl
    def llmaas_native_context(self, context):
        self.contexts.append(context)
        context.file_weights().set_memory(self.kept, ARENA)

    @property
    def stats(self):
        """Figures of the last context's weights."""
        return self.contexts[-1].file_weights().stats()
