"""``llmaas datastore``: management of the stored chats that are mixed into replies."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import StoreError
from llmaas_plugins.cli.datastore.build import add_actions
from llmaas_plugins.cli.datastore.reports import (
    contents_report,
    contents_text,
    conversation_row,
    list_text,
    selected_report,
    stats_report,
    stats_text,
)
from llmaas_plugins.cli.datastore.settings import datastore_directory
from llmaas_plugins.cli.files import TUNE_PREFIX
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.output import counted, print_report, printable, size_text
from llmaas_plugins.cli.store_actions import add_action
from llmaas_plugins.files.temporary_folder import remove_leftovers

if TYPE_CHECKING:
    from llmaas_plugins.chats.exports import Conversation
    from llmaas_plugins.knn_lm.archive.archive import Archive
    from llmaas_plugins.knn_lm.archive.conversation_info import ConversationInfo

__all__ = ["add_parser"]

_ID = re.compile("[0-9a-f]{32}")


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its actions."""
    parser = subparsers.add_parser(
        "datastore", help="build, inspect and erase the stored chats that are mixed into replies"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_actions(actions)
    add_action(
        actions, "stats", stats, "print the datastore's size, its model, and how much is selected"
    )
    inspect_ = add_action(
        actions,
        "inspect",
        inspect,
        "list the stored conversations; with an ID, print one conversation: its messages, and "
        "which of its tokens are selected",
    )
    inspect_.add_argument(
        "conversation", nargs="?", metavar="ID", help="a conversation's id, or its beginning"
    )
    inspect_.add_argument(
        "--model", type=Path, metavar="GGUF", help="show the selected tokens as text of this model"
    )
    forget_ = add_action(
        actions,
        "forget",
        forget,
        "erase conversations from every file, including the selected pairs, permanently and "
        "without asking again",
    )
    which = forget_.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "conversations", nargs="*", default=[], metavar="ID", help="ids, or their beginnings"
    )
    which.add_argument("--app", metavar="NAME", help="every conversation of this app")
    which.add_argument(
        "--no-app",
        action="store_true",
        help="every conversation that names no app, such as those of ChatGPT's export",
    )
    which.add_argument("--all", action="store_true", help="everything, including damaged files")


def stats(args: argparse.Namespace) -> int:
    """Print sizes and apps, and the model that the datastore belongs to."""
    from llmaas_plugins.files.store_lock import user
    from llmaas_plugins.knn_lm.archive.archive import Archive
    from llmaas_plugins.knn_lm.archive.files import FILES, LOCK
    from llmaas_plugins.knn_lm.datastore.summary import read_summary

    directory = datastore_directory(args)
    with Archive.open(directory) as archive:
        found = stats_report(archive, user(directory / LOCK, FILES))
    try:
        selected = read_summary(directory)
        found["selected"] = selected_report(selected) if selected else None
    except StoreError as error:
        found["selected"] = {"error": str(error)}
    print_report(args, found, stats_text(found))
    return 0


def inspect(args: argparse.Namespace) -> int:
    """List the conversations, or show one."""
    from llmaas_plugins.knn_lm.archive.archive import Archive
    from llmaas_plugins.knn_lm.datastore.summary import read_summary

    directory = datastore_directory(args)
    with Archive.open(directory) as archive:
        rows, selected = archive.conversations(), read_summary(directory)
        if args.conversation is None:
            report = {"conversations": [conversation_row(row, selected) for row in rows]}
            print_report(args, report, list_text(report["conversations"]))
            return 0
        id_ = _resolved(args.conversation, [row.id for row in rows])
        row = next(row for row in rows if row.id == id_)
        shown = conversation_row(row, selected)
        shown |= contents_report(archive, id_, selected, args.model)
    print_report(args, shown, contents_text(shown))
    return 0


def forget(args: argparse.Namespace) -> int:
    """Erase conversations."""
    from llmaas_plugins.knn_lm.archive.archive import Archive
    from llmaas_plugins.knn_lm.build.forget import forget_all, forget_conversations

    directory = datastore_directory(args)
    with stoppable("repeat the command to forget the rest"):
        remove_leftovers(directory.parent, TUNE_PREFIX)  # copies of a `llmaas tune` that was killed
        if args.all:
            gone = forget_all(directory)
        else:
            with Archive.open(directory, writable=True) as archive:
                gone = forget_conversations(archive, _chosen(args, archive), _is_wanted(args))
                if (args.app is not None or args.no_app) and not gone.n_conversations:
                    raise _no_such_app(args.app, archive)
    text = (
        f"{counted(gone.n_conversations, 'conversation')} and "
        f"{counted(gone.n_pairs, 'pair')} removed, {gone.n_selected:,} of those selected; "
        f"{size_text(gone.freed_bytes)} freed."
    )
    left = [
        f"{printable(path)} is no chat export, so nobody knows what is in it. It stays: remove it, "
        "or correct it."
        for path in gone.unread
    ]
    print_report(args, dataclasses.asdict(gone), [text, *left])
    return 0


# -- internals -----------------------------------------------------------------------------------


def _is_wanted(args: argparse.Namespace) -> Callable[[Conversation | ConversationInfo], bool]:
    """Return a function that tells whether the conversations of an app, or of none, have one."""
    if args.no_app:
        return lambda one: one.is_shared
    return lambda one: one.app == args.app and not one.is_shared


def _no_such_app(app: str | None, archive: Archive) -> StoreError:
    rows = archive.conversations()
    apps = ", ".join(sorted({printable(row.app) for row in rows if not row.is_shared}))
    what = "that names no app" if app is None else f"of app {app!r}"
    others = " `--no-app` forgets those that name none." if any(r.is_shared for r in rows) else ""
    return StoreError(
        f"no conversation {what}; nothing was changed. Known apps: {apps or 'none'}.{others}"
    )


def _chosen(args: argparse.Namespace, archive: Archive) -> list[bytes]:
    """Return the ids of the conversations to forget.

    Raises:
        StoreError: An id is unknown.
    """
    from llmaas_plugins.knn_lm.datastore.summary import read_summary

    if args.app is not None or args.no_app:
        ids = [row.id for row in archive.conversations() if _is_wanted(args)(row)]
    else:
        selected = read_summary(archive.directory)
        known = [id_.hex() for id_ in archive.ids()]
        known += [id_ for id_ in selected.positions if _ID.fullmatch(id_)] if selected else []
        ids = [_resolved(text, known, "; nothing was changed") for text in args.conversations]
    return [bytes.fromhex(id_) for id_ in ids]


def _resolved(text: str, known: list[str], then: str = "") -> str:
    """Return the id that begins with ``text``; an error ends with ``then``."""
    found = {id_ for id_ in known if text and id_.startswith(text.lower())}
    if len(found) != 1:
        what = (
            f"{len(found)} conversations have ids that begin with" if found else "no conversation"
        )
        raise StoreError(
            f"{what} {text!r}{then}. `llmaas datastore inspect` lists the conversations."
        )
    return found.pop()
