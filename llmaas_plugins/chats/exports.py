"""Read chat exports: OpenAI-style JSON or JSONL, and ChatGPT's `conversations.json`.

The format is recognized by content, never by file name. Exports are untrusted: sizes are limited,
and links between messages are checked. Every error tells the place, what was found and what was
expected. Text that no tokenizer could take (lone surrogates, NUL) becomes U+FFFD.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from llmaas_plugins.files.json_rows import json_rows, named, wrong

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MAX_BYTES", "NO_APP", "Conversation", "Message", "Role", "load_conversations"]

MAX_BYTES = 512 * 1024 * 1024

NO_APP = "chat"
"""App name for conversations whose export names no app."""

Role: TypeAlias = Literal["system", "user", "assistant"]

# None marks roles whose messages are machine traffic, not conversation.
_ROLES: dict[str, Role | None] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "gpt": "assistant",
    "tool": None,
    "function": None,
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_CHATGPT_TEXT = ("text", "multimodal_text")
_UNENCODABLE = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Message:
    """Message of a conversation; its text is never empty."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation in chronological order.

    Attributes:
        title: Title from the export, or the file's name and the conversation's number.
        app: Name of the app that owns the conversation; `NO_APP` if the export names none.
        messages: Messages; at least one.
        is_shared: Whether the export names no app, so that every app may use the conversation.
    """

    title: str
    app: str
    messages: tuple[Message, ...]
    is_shared: bool = False

    @property
    def n_characters(self) -> int:
        """Characters of all messages."""
        return sum(len(message.content) for message in self.messages)


def load_conversations(path: Path, *, max_bytes: int = MAX_BYTES) -> list[Conversation]:
    """Read every conversation of a chat export.

    JSONL is read line by line; a JSON document is read whole. Conversations without any text
    (pictures only, tool traffic only) are left out.

    Args:
        path: An export in UTF-8: JSON or JSONL with `messages` or `turns`, or ChatGPT's
            `conversations.json`.
        max_bytes: Size limit; larger files are refused.

    Returns:
        At least one conversation, in file order.

    Raises:
        ConfigError: The file cannot be read, is too large, or is no export of these formats.
    """
    found = [
        conversation
        for number, (where, row) in enumerate(json_rows(path, max_bytes=max_bytes), start=1)
        if (conversation := _conversation(row, where, f"{path.stem} {number}")).messages
    ]
    if not found:
        raise wrong(str(path), "no message with text", "at least one conversation")
    return found


def _conversation(row: object, where: str, default_title: str) -> Conversation:
    key = _row_key(row) if isinstance(row, dict) else None
    if key is None or not isinstance(row, dict):
        expected = "an object with 'messages', 'turns' or 'mapping'"
        raise wrong(where, named(row), expected)
    messages = _chatgpt(row, where) if key == "mapping" else _openai(row[key], key, where)
    title, app = row.get("title"), row.get("app")
    names_app = isinstance(app, str) and bool(app.strip())
    return Conversation(
        title=_clean(title) if isinstance(title, str) and title.strip() else default_title,
        app=_clean(str(app)) if names_app else NO_APP,
        messages=tuple(messages),
        is_shared=not names_app,
    )


def _row_key(row: dict[str, Any]) -> str | None:
    return next((key for key in ("messages", "turns", "mapping") if key in row), None)


def _openai(items: object, key: str, where: str) -> Iterator[Message]:
    if not isinstance(items, list):
        raise wrong(where, f"{named(items)} in {key!r}", "a list of messages")
    for number, item in enumerate(items, start=1):
        place = f"{where}, message {number}"
        if not isinstance(item, dict) or "role" not in item:
            raise wrong(place, named(item), "an object with 'role' and 'content'")
        yield from _message(item["role"], _content(item.get("content"), place), place)


def _message(role: object, text: str, where: str) -> Iterator[Message]:
    """Yield the message, or nothing if it is machine traffic or has no text."""
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise wrong(where, f"role {named(role)}", f"one of {', '.join(_ROLES)}")
    mapped = _ROLES[role.lower()]
    if mapped is not None and text.strip():
        yield Message(mapped, _clean(text).strip())


def _content(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, f"content {named(content)}", "a string or a list of parts")
    return "\n".join(text for part in content if (text := _part_text(part)))


def _part_text(part: object) -> str:
    if isinstance(part, dict):
        part = part.get("text") if part.get("type") in _TEXT_PARTS else None
    return part if isinstance(part, str) else ""


def _chatgpt(row: dict[str, Any], where: str) -> Iterator[Message]:
    for node_id, message in reversed(_branch(row, where)):
        place = f"{where}, node {node_id[:40]!r}"
        author, content = message.get("author"), message.get("content")
        if not isinstance(author, dict) or not isinstance(content, dict):
            raise wrong(place, named(message), "a message with 'author' and 'content' objects")
        if _is_shown(message) and content.get("content_type") in _CHATGPT_TEXT:
            yield from _message(author.get("role"), _content(content.get("parts"), place), place)


def _is_shown(message: dict[str, Any]) -> bool:
    """Return whether the user saw the message; hidden set-up and tool calls are not shown."""
    metadata = message.get("metadata")
    hidden = isinstance(metadata, dict) and metadata.get("is_visually_hidden_from_conversation")
    return not hidden and message.get("recipient") in (None, "all")


def _branch(row: dict[str, Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    """Follow `current_node` to the root; other branches are drafts that the user abandoned."""
    mapping, node_id = row["mapping"], row.get("current_node")
    if not isinstance(mapping, dict) or (mapping and node_id is None):
        raise wrong(where, named(row), "a 'mapping' object and its 'current_node'")
    branch: list[tuple[str, dict[str, Any]]] = []
    seen: set[str] = set()
    while mapping and node_id is not None:
        node = mapping.get(node_id) if isinstance(node_id, str) else None
        if not isinstance(node, dict):
            raise wrong(where, f"a link to {named(node_id)}", "the id of a node in 'mapping'")
        if node_id in seen:
            raise wrong(where, f"a cycle at node {node_id[:40]!r}", "parents that end at a root")
        seen.add(node_id)
        if isinstance(message := node.get("message"), dict):
            branch.append((node_id, message))
        node_id = node.get("parent")
    return branch


def _clean(text: str) -> str:
    return _UNENCODABLE.sub("\ufffd", text)
