"""``llmaas store``: inspection, check, cleanup and copy of the KV store on disk."""

from __future__ import annotations

import argparse
import dataclasses
import sqlite3
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import StoreError
from llmaas_plugins.cli.output import counted, print_report, printable, progress, size_text
from llmaas_plugins.cli.store_actions import add_action, chosen_directory, expanded, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmaas_plugins.kv_chunks.config import KVChunksConfig
    from llmaas_plugins.kv_chunks.maintenance.cleanup import CleanupResult
    from llmaas_plugins.kv_chunks.maintenance.snapshot import StoreSnapshot

__all__ = ["add_parser"]

_MOST_SHOWN = 20


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its actions."""
    parser = subparsers.add_parser("store", help="inspect, check and clean up the KV store on disk")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_action(actions, "stats", stats, "print contents and users; works while the store is in use")
    check_ = add_action(
        actions, "check", check, "verify every chunk; works while the store is in use"
    )
    check_.add_argument("--repair", action="store_true", help="drop damaged chunks")
    add_action(actions, "gc", gc, "drop unusable chunks, and free their disk space")
    export_ = add_action(
        actions, "export", export, "copy the store, or one context, to a new store"
    )
    export_.add_argument("target", type=Path, metavar="DIR", help="directory to create")
    export_.add_argument("--context", metavar="NAME", help="only this context")
    forget_ = add_action(
        actions,
        "forget",
        forget,
        "erase contexts' cells from the disk, permanently; texts in a service's "
        "contexts are not affected: delete them through the service",
    )
    which = forget_.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "contexts", nargs="*", default=[], metavar="CONTEXT", help="names of contexts"
    )
    which.add_argument("--all", action="store_true", help="everything in the store")


def stats(args: argparse.Namespace) -> int:
    """Print sizes, contexts and models."""
    from llmaas_plugins.kv_chunks.maintenance.snapshot import read_snapshot

    settings = _settings(args)
    try:
        found = _stats(read_snapshot(_directory(args)), int(settings.disk_budget))
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"cannot read KV store {_directory(args)}: {error}. See `llmaas store check`."
        ) from error
    print_report(args, found, _stats_text(found))
    return 0


def check(args: argparse.Namespace) -> int:
    """Verify the whole store; return 0 if it is sound or was repaired, else 1."""
    from llmaas_plugins.kv_chunks.maintenance.checking import check_store

    directory = _directory(args)
    checked = check_store(directory, progress("checking", "chunk"))
    report = {
        "store": str(directory),
        "holder": checked.holder,
        "chunks": checked.n_chunks,
        "problems": checked.problems,
        "repaired": False,
    }
    if checked.problems and args.repair:
        _tidy(directory, shrink=False)
        report["repaired"] = True
    lines = [f"{counted(checked.n_chunks, 'chunk')} in {directory}: {_verdict(checked.problems)}"]
    lines += [f"  {problem}" for problem in checked.problems[:_MOST_SHOWN]]
    if len(checked.problems) > _MOST_SHOWN:
        lines.append(f"  … and {len(checked.problems) - _MOST_SHOWN} more (--json has them all)")
    if report["repaired"]:
        lines.append("Damaged data was dropped; its tokens are evaluated again when needed.")
    elif checked.problems:
        lines.append("`llmaas store check --repair` drops damaged data.")
    print_report(args, report, lines)
    return 1 if checked.problems and not report["repaired"] else 0


def gc(args: argparse.Namespace) -> int:
    """Drop unreachable and unreadable chunks, erase free space, and shorten the files."""
    cleaned = _tidy(_directory(args), shrink=True)
    text = f"{counted(cleaned.n_chunks, 'chunk')} dropped, {size_text(cleaned.freed_bytes)} freed."
    print_report(args, dataclasses.asdict(cleaned), [text])
    return 0


def export(args: argparse.Namespace) -> int:
    """Copy chunks to a new store; return 1 if some could not be copied, else 0."""
    from llmaas_plugins.kv_chunks.maintenance.export import export_store

    done = export_store(
        _directory(args), expanded(args.target), args.context, progress("copying", "chunk")
    )
    lines = [
        f"{counted(done.n_contexts, 'context')}, {counted(done.n_chunks, 'chunk')}, "
        f"{size_text(done.n_bytes)} copied to {args.target}."
    ]
    if done.skipped:
        lines.append(
            f"{counted(done.skipped, 'chunk')} could not be copied; see `llmaas store check`."
        )
    print_report(args, dataclasses.asdict(done), lines)
    return 1 if done.skipped else 0


def forget(args: argparse.Namespace) -> int:
    """Remove contexts; chunks that other contexts share stay."""
    from llmaas_plugins.kv_chunks.maintenance.cleanup import StoreCleanup

    cleanup = StoreCleanup(_directory(args))
    try:
        known = cleanup.contexts()
        unknown = [name for name in args.contexts if name not in known]
        if unknown:
            raise StoreError(
                f"no such context: {', '.join(map(repr, unknown))}; nothing was changed. "
                "`llmaas store stats` lists the known contexts."
            )
        if args.all:
            cleanup.forget_all()
        for name in args.contexts:
            cleanup.forget(name)
        cleaned = cleanup.finish(shrink=args.all)
    finally:
        cleanup.close()
    text = (
        f"{counted(cleaned.n_contexts, 'context')} and {counted(cleaned.n_chunks, 'chunk')} "
        f"removed, {size_text(cleaned.freed_bytes)} freed."
    )
    print_report(args, dataclasses.asdict(cleaned), [text])
    return 0


# -- internals -----------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> KVChunksConfig:
    from llmaas_plugins.kv_chunks.config import KVChunksConfig

    settings = settings_of(args, "kv_chunks", KVChunksConfig)
    assert isinstance(settings, KVChunksConfig)
    return settings


def _directory(args: argparse.Namespace) -> Path:
    return chosen_directory(args, lambda: _settings(args).store)


def _tidy(directory: Path, *, shrink: bool) -> CleanupResult:
    from llmaas_plugins.kv_chunks.maintenance.cleanup import StoreCleanup

    cleanup = StoreCleanup(directory)  # drops impossible rows, or sets a damaged index aside
    try:
        cleanup.drop_damaged(progress("checking", "chunk"))
        cleanup.drop_unreachable()
        return cleanup.finish(shrink=shrink)
    finally:
        cleanup.close()


def _stats(contents: StoreSnapshot, budget: int) -> dict[str, Any]:
    from llmaas_plugins.kv_chunks.maintenance.cleanup import disk_bytes
    from llmaas_plugins.kv_chunks.store.store_format import FORMAT

    rows = contents.rows.values()
    roots = Counter(contents.root(row) for row in rows)
    levels = Counter(row.bits for row in rows)
    names = list(contents.contexts)
    return {
        "store": str(contents.directory),
        "format": FORMAT,
        "holder": contents.holder,
        "contexts": names,
        "oldest": names[0] if names else None,
        "newest": names[-1] if names else None,
        "chunks": len(rows),
        "chunk_bytes": sum(row.size for row in rows),
        "levels": {str(bits): n for bits, n in sorted(levels.items(), reverse=True) if bits},
        "slab_bytes": contents.slab_bytes,
        "index_bytes": sum(
            file.stat().st_size for file in contents.directory.glob("index.sqlite*")
        ),
        "disk_bytes": disk_bytes(contents.directory),
        "budget_bytes": budget,
        "models": [
            {"root": root.hex(), "chunks": n, "is_known": root in contents.layouts}
            for root, n in roots.most_common()
        ],
        "unsound_rows": contents.n_invalid_rows,
    }


def _stats_text(found: dict[str, Any]) -> Iterable[str]:
    names = found["contexts"]
    yield f"{found['store']}  (format {found['format']})"
    rows = {
        "in use by": found["holder"] or "nobody",
        "contexts": str(len(names)),
        "  latest use first": _some(names[::-1]),
        "chunks": f"{found['chunks']}, {size_text(found['chunk_bytes'])}",
        "  by bits a value": ", ".join(f"{b}: {n}" for b, n in found["levels"].items()) or "-",
        "slab": f"{size_text(found['slab_bytes'])} of {size_text(found['budget_bytes'])}",
        "index": size_text(found["index_bytes"]),
        "taken on disk": size_text(found["disk_bytes"]),
    }
    if found["models"]:
        rows["by model, settings, app"] = str(len(found["models"]))
    for model in found["models"]:
        unreachable = "" if model["is_known"] else ", unreachable"
        rows[f"  {model['root'][:12]}"] = counted(model["chunks"], "chunk") + unreachable
    if found["unsound_rows"]:
        rows["unsound rows"] = f"{found['unsound_rows']}; see `llmaas store check`"
    for name, value in rows.items():
        yield f"  {name:<24}{value}"


def _verdict(problems: Sequence[str]) -> str:
    return counted(len(problems), "problem") if problems else "sound"


def _some(names: Sequence[str]) -> str:
    shown = [printable(name) for name in names[:_MOST_SHOWN]]
    more = f", … ({len(names)} in all)" if len(names) > _MOST_SHOWN else ""
    return ", ".join(shown) + more if shown else "-"
