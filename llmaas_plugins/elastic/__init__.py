"""One model in many widths, switched for each request (ElastiLM, §3.2).

    from llmaas_plugins import elastic

    with elastic.level(0.6):
        llm("Once upon a time")

``units`` says what can be left out of a model, ``reordering`` puts what matters first, and
``prepared_file`` writes that with the widths of each level; any llama.cpp loads such a file.
"""

from __future__ import annotations

from llmaas_plugins.elastic.levels import level

__all__ = ["level"]
