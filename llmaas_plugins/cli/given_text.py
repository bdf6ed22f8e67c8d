"""Tokens of texts that a model did not write: texts that were given, and packaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_plugins.cli.files import content_of

if TYPE_CHECKING:
    from llmaas_hooks import Tokens

__all__ = [
    "add_prompt_text",
    "conversation_files",
    "packaged_conversations",
    "packaged_tokens",
    "prompt_texts",
    "tokens_of",
]


def add_prompt_text(source: Any) -> None:
    """Add ``--text``, of which parts are prompts, to a group of options."""
    source.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="text of which parts are the prompts, best of the kind that the model will see "
        "(default: packaged texts and conversations)",
    )


def prompt_texts(paths: Sequence[Path] | None) -> list[bytes]:
    """Return the texts of ``--text``, or the packaged ones and the packaged conversations.

    Raises:
        ConfigError: A file cannot be read.
    """
    from llmaas_plugins.elastic.calibration import packaged_texts

    if paths:
        return [content_of(path) for path in paths]
    return [text.encode() for text in (*packaged_texts().values(), *packaged_conversations())]


def tokens_of(content: bytes, model: Any) -> Tokens:
    """Return the tokens of a text."""
    import numpy as np

    return np.array(model.tokenize(content, False, False), np.int32)


def packaged_tokens(model: Any, n_tokens: int) -> dict[str, Tokens]:
    """Return tokens of the packaged texts by name: ``n_tokens`` in all, at least one of each."""
    from llmaas_plugins.elastic.calibration import packaged_texts

    texts = packaged_texts()
    n_each = max(n_tokens // len(texts), 1)
    return {name: tokens_of(text.encode(), model)[:n_each] for name, text in texts.items()}


def packaged_conversations() -> list[str]:
    """Return the packaged conversations, which no calibration reads."""
    from llmaas_plugins.chats.exports import load_conversations

    talks = [talk for path in conversation_files() for talk in load_conversations(path)]
    return [
        "\n".join(f"{message.role.capitalize()}: {message.content}" for message in talk.messages)
        for talk in talks
    ]


def conversation_files() -> list[Path]:
    """Return the paths of the packaged conversations, one file for each app."""
    from importlib.resources import files

    folder = Path(str(files("llmaas_plugins.demo"))) / "conversations"
    return sorted(folder.glob("*.jsonl"))
