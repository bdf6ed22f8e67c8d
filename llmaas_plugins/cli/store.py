"""``llmaas store``: look at the KV store on disk, check it, tidy it, copy it, forget contexts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.config import PluginTable, load_config, validated

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmaas_plugins.kv_chunks.config import KVChunksConfig
    from llmaas_plugins.kv_chunks.contents import Contents
    from llmaas_plugins.kv_chunks.index import ChunkRow
    from llmaas_plugins.kv_chunks.upkeep import Tidied

__all__ = ["add_parser"]

_MOST_SHOWN = 20
_MIB = 1 << 20


def add_parser(subparsers: Any) -> None:
    """Register the sub-command and its own ones."""
    parser = subparsers.add_parser("store", help="look at, check and tidy the KV store on disk")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _action(actions, "stats", stats, "what is in it, and who uses it; also while it is in use")
    check_ = _action(actions, "check", check, "verify every chunk; also while it is in use")
    check_.add_argument("--repair", action="store_true", help="drop what is wrong")
    _action(actions, "gc", gc, "drop what is useless, give the space back")
    export_ = _action(actions, "export", export, "copy it, or a context of it, to a new store")
    export_.add_argument("target", type=Path, metavar="DIR", help="a directory to be made")
    export_.add_argument("--context", metavar="NAME", help="only this context")
    forget_ = _action(
        actions,
        "forget",
        forget,
        "remove contexts' cells from the disk for good; texts that the "
        "service keeps are deleted there",
    )
    which = forget_.add_mutually_exclusive_group(required=True)
    which.add_argument("contexts", nargs="*", default=[], metavar="CONTEXT", help="its name")
    which.add_argument("--all", action="store_true", help="everything in the store")


def _action(actions: Any, name: str, func: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("--config", metavar="FILE", help="llmaas.toml (default: $LLMAAS_CONFIG)")
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="the store (default: as configured)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=func)
    return parser


def stats(args: argparse.Namespace) -> int:
    """Print sizes, contexts and models."""
    from llmaas_plugins.kv_chunks.contents import read_contents

    settings = _settings(args)
    try:
        found = _stats(read_contents(_directory(args)), int(settings.disk_budget))
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"cannot read KV store {_directory(args)}: {error}. See `llmaas store check`."
        ) from error
    _print(args, found, _stats_text(found))
    return 0


def check(args: argparse.Namespace) -> int:
    """Verify everything; 0 when it is sound, else 1."""
    from llmaas_plugins.kv_chunks.checking import check_store

    directory = _directory(args)
    checked = check_store(directory, _bar("checking"))
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
    lines = [f"{checked.n_chunks} chunks in {directory}: {_verdict(checked.problems)}"]
    lines += [f"  {problem}" for problem in checked.problems[:_MOST_SHOWN]]
    if len(checked.problems) > _MOST_SHOWN:
        lines.append(f"  … and {len(checked.problems) - _MOST_SHOWN} more (--json has them all)")
    if report["repaired"]:
        lines.append("What was wrong was dropped; those tokens are evaluated again when needed.")
    elif checked.problems:
        lines.append("`llmaas store check --repair` drops what is wrong.")
    _print(args, report, lines)
    return 1 if checked.problems and not report["repaired"] else 0


def gc(args: argparse.Namespace) -> int:
    """Drop chunks nobody can reach or read, erase free space, shorten the files."""
    tidied = _tidy(_directory(args), shrink=True)
    text = f"{tidied.n_chunks} chunks dropped, {_size(tidied.freed_bytes)} given back."
    _print(args, dataclasses.asdict(tidied), [text])
    return 0


def export(args: argparse.Namespace) -> int:
    """Copy chunks to a new store; 1 when some could not be copied."""
    from llmaas_plugins.kv_chunks.upkeep import export_store

    done = export_store(_directory(args), args.target, args.context, _bar("copying"))
    lines = [
        f"{done.n_contexts} contexts, {done.n_chunks} chunks, {_size(done.n_bytes)} "
        f"copied to {args.target}."
    ]
    if done.skipped:
        lines.append(f"{done.skipped} chunks could not be copied; see `llmaas store check`.")
    _print(args, dataclasses.asdict(done), lines)
    return 1 if done.skipped else 0


def forget(args: argparse.Namespace) -> int:
    """Remove contexts; what others share stays."""
    from llmaas_plugins.kv_chunks.upkeep import Upkeep

    upkeep = Upkeep(_directory(args))
    try:
        known = upkeep.contexts()
        unknown = [name for name in args.contexts if name not in known]
        if unknown:
            raise StoreError(
                f"no such context: {', '.join(map(repr, unknown))}; nothing was changed. "
                "`llmaas store stats` lists those there are."
            )
        if args.all:
            upkeep.forget_all()
        for name in args.contexts:
            upkeep.forget(name)
        tidied = upkeep.finish(shrink=args.all)
    finally:
        upkeep.close()
    text = (
        f"{tidied.n_contexts} contexts and {tidied.n_chunks} chunks removed, "
        f"{_size(tidied.freed_bytes)} given back."
    )
    _print(args, dataclasses.asdict(tidied), [text])
    return 0


# -- inside --------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> KVChunksConfig:
    from llmaas_plugins.kv_chunks.config import KVChunksConfig

    table = load_config(args.config).plugins.get("kv_chunks", PluginTable(True, {}, {}))
    settings = validated("kv_chunks", KVChunksConfig, table)
    assert isinstance(settings, KVChunksConfig)
    return settings


def _directory(args: argparse.Namespace) -> Path:
    if args.store is not None and not str(args.store):
        raise ConfigError("--store needs a directory")
    path: Path = args.store or _settings(args).store
    return path.expanduser()


def _tidy(directory: Path, *, shrink: bool) -> Tidied:
    from llmaas_plugins.kv_chunks.upkeep import Upkeep

    upkeep = Upkeep(directory)  # opening drops rows that cannot be right, or sets the index aside
    try:
        upkeep.drop_damaged(_bar("checking"))
        upkeep.drop_unreachable()
        return upkeep.finish(shrink=shrink)
    finally:
        upkeep.close()


def _stats(contents: Contents, budget: int) -> dict[str, Any]:
    from llmaas_plugins.kv_chunks.formats import FORMAT
    from llmaas_plugins.kv_chunks.upkeep import disk_bytes

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
        "unsound_rows": contents.unsound,
    }


def _stats_text(found: dict[str, Any]) -> Iterable[str]:
    names = found["contexts"]
    yield f"{found['store']}  (format {found['format']})"
    rows = {
        "in use by": found["holder"] or "nobody",
        "contexts": str(len(names)),
        "  latest use first": _some(names[::-1]),
        "chunks": f"{found['chunks']}, {_size(found['chunk_bytes'])}",
        "  by bits a value": ", ".join(f"{b}: {n}" for b, n in found["levels"].items()) or "-",
        "slab": f"{_size(found['slab_bytes'])} of {_size(found['budget_bytes'])}",
        "index": _size(found["index_bytes"]),
        "taken on disk": _size(found["disk_bytes"]),
    }
    for model in found["models"]:
        what = "model" if model["is_known"] else "(unreachable)"
        rows[f"{what} {model['root'][:12]}"] = f"{model['chunks']} chunks"
    if found["unsound_rows"]:
        rows["unsound rows"] = f"{found['unsound_rows']}; see `llmaas store check`"
    for name, value in rows.items():
        yield f"  {name:<24}{value}"


def _verdict(problems: Sequence[str]) -> str:
    return f"{len(problems)} problem(s)" if problems else "sound"


def _some(names: Sequence[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:_MOST_SHOWN]]
    more = f", … ({len(names)} in all)" if len(names) > _MOST_SHOWN else ""
    return ", ".join(shown) + more if shown else "-"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:.1f} MiB" if n_bytes >= _MIB else f"{n_bytes / 1024:.0f} KiB"


def _bar(what: str) -> Any:
    """A progress bar on a terminal's stderr."""
    from tqdm import tqdm

    def wrap(rows: Sequence[ChunkRow]) -> Iterable[ChunkRow]:
        bar: Iterable[ChunkRow] = tqdm(
            rows, desc=what, unit="chunk", disable=None, leave=False, file=sys.stderr
        )
        return bar

    return wrap


def _print(args: argparse.Namespace, report: dict[str, Any], lines: Iterable[str]) -> None:
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(lines))
