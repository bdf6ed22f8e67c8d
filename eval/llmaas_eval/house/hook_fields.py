"""Fields of hook specifications, as a list on the site.

Griffe loads this file as an extension. A specification's docstring has fields such as "When: …" and
"Cost: …", which Markdown would join to one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Function

__all__ = ["HookFields", "listed"]

_FIELD = re.compile(r"\s+(When|Thread|Cost|Returns|Errors): ")


class HookFields(Extension):
    """Extension that lists the fields of ``llmaas_hooks.specs``."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Rewrite a specification's docstring."""
        if func.docstring is not None and func.path.startswith("llmaas_hooks.specs."):
            func.docstring.value = listed(func.docstring.value)


def listed(docstring: str) -> str:
    """Return a docstring with each of its fields as an item of a list."""
    summary, *fields = _FIELD.split(docstring)
    items = [
        f"- **{name}:** {' '.join(text.split())}"
        for name, text in zip(fields[::2], fields[1::2], strict=True)
    ]
    return "\n".join([summary, "", *items])
