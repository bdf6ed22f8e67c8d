"""Reports of ``llmaas datastore`` as plain values, and their text."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.output import counted, one_line, printable, size_text
from llmaas_plugins.model.loading import vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from llmaas_plugins.knn_lm.archive.archive import Archive
    from llmaas_plugins.knn_lm.archive.conversation_info import ConversationInfo
    from llmaas_plugins.knn_lm.datastore.summary import DatastoreSummary

__all__ = [
    "contents_report",
    "contents_text",
    "conversation_row",
    "list_text",
    "selected_report",
    "stats_report",
    "stats_text",
]

_ID_DIGITS = 12
_TITLE = 40
_N_BEFORE = 6


def stats_report(archive: Archive, holder: str | None) -> dict[str, Any]:
    """Summarize an archive's contents."""
    rows, binding = archive.conversations(), archive.binding
    apps = Counter(row.app for row in rows if not row.is_shared)
    return {
        "store": str(archive.directory),
        "holder": holder,
        "model": binding.fingerprint.hex() if binding else None,
        "key_kind": binding.key_kind if binding else None,
        "n_embd": binding.n_embd if binding else None,
        "conversations": len(rows),
        "apps": dict(apps.most_common()),
        "without_app": sum(row.is_shared for row in rows),
        "sources": sorted({row.source for row in rows}),
        "oldest": _date(min(row.added for row in rows)) if rows else None,
        "newest": _date(max(row.added for row in rows)) if rows else None,
        "tokens": sum(row.n_tokens for row in rows),
        "pairs": archive.n_pairs,
        "disk_bytes": archive.n_bytes,
    }


def selected_report(selected: DatastoreSummary) -> dict[str, Any]:
    """Summarize the selected pairs."""
    return {
        "model": selected.fingerprint.hex(),
        "conversations": sum(1 for own in selected.positions.values() if len(own)),
        "pairs": selected.n_pairs,
        "disk_bytes": selected.n_bytes,
        "settings": dict(selected.settings),
    }


def stats_text(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a ``stats_report`` with its ``selected`` entry."""
    yield found["store"]
    apps = [f"{printable(app)}: {n}" for app, n in found["apps"].items()]
    apps += [f"none: {found['without_app']}"] if found["without_app"] else []
    rows = {
        "in use by": found["holder"] or "nobody",
        "model": _model_text(found),
        "conversations": f"{found['conversations']:,}",
        "  by app": ", ".join(apps) or "-",
        "  from": ", ".join(map(printable, found["sources"])) or "-",
        "  added": f"{found['oldest']} to {found['newest']}" if found["oldest"] else "-",
        "tokens": f"{found['tokens']:,}",
        "pairs": f"{found['pairs']:,}, {size_text(found['disk_bytes'])}",
        "selected": _selected_text(found),
    }
    for name, value in rows.items():
        yield f"  {name:<16}{value}"


def _model_text(found: dict[str, Any]) -> str:
    if found["model"] is None:  # all conversations were forgotten
        return "-"
    return f"{found['model'][:12]}, keys {found['key_kind']} of {found['n_embd']}"


def _selected_text(found: dict[str, Any]) -> str:
    selected = found["selected"]
    if selected is None:
        return "nothing yet; run `llmaas datastore select`"
    if "error" in selected:
        return str(selected["error"])
    text = (
        f"{counted(selected['pairs'], 'pair')} of "
        f"{counted(selected['conversations'], 'conversation')}, "
        f"{size_text(selected['disk_bytes'])}"
    )
    is_foreign = found["model"] is not None and selected["model"] != found["model"]
    return text + (", for another model" if is_foreign else "")


def conversation_row(row: ConversationInfo, selected: DatastoreSummary | None) -> dict[str, Any]:
    """Return one conversation's row in a list."""
    return {
        "id": row.id,
        "title": row.title,
        "app": None if row.is_shared else row.app,
        "source": row.source,
        "added": _date(row.added),
        "messages": row.n_messages,
        "tokens": row.n_tokens,
        "pairs": row.n_pairs,
        "selected": len(selected.positions_in(row.id)) if selected else 0,
        "disk_bytes": row.n_bytes,
    }


def list_text(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of conversations."""
    if not rows:
        yield "No conversations."
        return
    names = ("id", "added", "app", "source", "pairs", "selected", "title")
    table = [names] + [_cells(row) for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(names) - 1)]
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield "  ".join([*cells, line[-1]])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    title = printable(row["title"])
    title = title if len(title) <= _TITLE else title[: _TITLE - 1] + "…"
    return (
        row["id"][:_ID_DIGITS], row["added"][:10], printable(row["app"] or "-"),
        printable(row["source"]), f"{row['pairs']:,}", f"{row['selected']:,}", title,
    )  # fmt: skip


def contents_report(
    archive: Archive, id_: str, selected: DatastoreSummary | None, model: Path | None
) -> dict[str, Any]:
    """Return a conversation's messages and its selected tokens.

    Raises:
        ConfigError: The model cannot be loaded, or has another vocabulary.
    """
    key = bytes.fromhex(id_)
    tokens, messages = archive.tokens(key), archive.messages(key)
    positions = selected.positions_in(id_) if selected else np.empty(0, np.int32)
    chosen = [at for at in positions.tolist() if 0 <= at < len(tokens)]
    contexts = _contexts(model, tokens, chosen) if model else [(None, None)] * len(chosen)
    return {
        "contents": [{"role": message.role, "content": message.content} for message in messages],
        "selected_tokens": [
            {"position": at, "token": int(tokens[at]), "before": before, "text": text}
            for at, (before, text) in zip(chosen, contexts, strict=True)
        ],
    }


def contents_text(shown: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that show one conversation, with its messages and selected tokens."""
    yield f"{printable(shown['title'])}  ({printable(shown['app'])})"
    yield f"  id        {shown['id']}"
    yield f"  from      {printable(shown['source'])}, added {shown['added']}"
    yield f"  pairs     {shown['pairs']:,} of {shown['tokens']:,} tokens"
    for message in shown["contents"]:
        yield ""
        yield f"{message['role']}:"
        for line in message["content"].splitlines():
            yield "  " + "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line)
    yield ""
    yield f"selected: {shown['selected']:,} tokens"
    if any(token["text"] is not None for token in shown["selected_tokens"]):
        for token in shown["selected_tokens"]:
            before, text = one_line(token["before"]), one_line(token["text"])
            yield f"  {token['position']:>6}  {before}«{text}»"
    elif shown["selected_tokens"]:
        yield "  at " + ", ".join(str(token["position"]) for token in shown["selected_tokens"])
        yield "  (use --model to show them as text)"


def _contexts(
    model: Path, tokens: npt.NDArray[np.int32], positions: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the texts of tokens, each with the text of a few tokens before it."""
    with vocabulary(model) as vocab:
        if len(tokens) and tokens.max() >= vocab.n_vocab():
            raise ConfigError(
                f"{model} has {vocab.n_vocab()} tokens, but the conversation has token "
                f"{tokens.max()}. Give the model that the datastore was built with."
            )

        def text(first: int, end: int) -> str:
            part = tokens[first:end].tolist()
            return str(vocab.detokenize(part, special=True).decode(errors="replace"))

        return [(text(max(0, at - _N_BEFORE), at), text(at, at + 1)) for at in positions]


def _date(seconds: float) -> str:
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return moment.isoformat(timespec="seconds")
