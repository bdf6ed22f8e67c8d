"""``llmaas datastore build``, ``add`` and ``select``: from chat exports to selected pairs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, ContextCreate, ModelLoad, StoreError, hookimpl
from llmaas_hooks.native import NativeContext, States
from llmaas_plugins.cli.datastore.settings import datastore_directory, datastore_settings
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import as_loaded, check_file, trained_context
from llmaas_plugins.cli.options import at_least, finite
from llmaas_plugins.cli.output import counted, print_report, progress_bar
from llmaas_plugins.cli.store_actions import add_action
from llmaas_plugins.config import Config
from llmaas_plugins.model.loading import load_errors

if TYPE_CHECKING:
    from llmaas_plugins.chats.exports import Conversation
    from llmaas_plugins.knn_lm.build.build_datastore import BuildResult
    from llmaas_plugins.knn_lm.build.ingest import IngestCounts

__all__ = ["add_actions"]

_N_CTX = 2048


class _Natives:
    """Hook implementations that keep native contexts, and how the model was opened."""

    def __init__(self) -> None:
        self.contexts: dict[int, NativeContext] = {}
        self.load: ModelLoad | None = None

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Keep how the context's model was opened."""
        self.load = create.load

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep the context."""
        self.contexts[context.ctx] = context


def add_actions(actions: Any) -> None:
    """Register the actions that build a datastore."""
    build_ = add_action(
        actions,
        "build",
        build,
        "add the conversations of chat exports, and select the pairs to search; conversations "
        "that are stored already are skipped, so it can be stopped and run again",
    )
    add_ = add_action(
        actions,
        "add",
        add,
        "add conversations without selecting; `llmaas datastore select` does that",
    )
    select_ = add_action(
        actions,
        "select",
        select,
        "select the pairs to search from all stored chats; needs no model",
    )
    for parser in (build_, add_):
        _add_model_options(parser)
    for parser in (build_, select_):
        parser.add_argument(
            "--size",
            type=at_least(1),
            metavar="PAIRS",
            help="most pairs to select (default: plugins.knn_lm.size)",
        )
        parser.add_argument(
            "--how",
            choices=["draw", "top"],
            help="draw pairs, hard ones more often, or take the hardest (default: "
            "plugins.knn_lm.how)",
        )
        parser.add_argument("--seed", type=at_least(0), default=0, help="random seed (default 0)")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "exports",
        nargs="*",
        type=Path,
        metavar="EXPORT",
        help="ChatGPT's conversations.json, or OpenAI-style JSON or JSONL",
    )
    parser.add_argument(
        "--service-log",
        type=Path,
        metavar="DIR",
        help="also add the chats of `llmaas serve`; DIR is its service.state_dir. The datastore "
        "then learns the model's own replies, too",
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="GGUF", help="the model that your app uses"
    )
    parser.add_argument("--lora", type=Path, metavar="GGUF", help="LoRA adapter that your app uses")
    parser.add_argument(
        "--lora-scale", type=finite, default=1.0, help="scale of --lora (default 1)"
    )
    parser.add_argument("--chat-format", help="chat format of your app (default: the model's own)")
    parser.add_argument(
        "--n-ctx",
        type=at_least(1),
        help=f"context length in tokens (default {_N_CTX}, or the model's if that is less)",
    )
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (default: all)")
    parser.add_argument(
        "--characters",
        type=at_least(1),
        metavar="N",
        help="read the first conversations only, until they have N characters together (default: "
        "all)",
    )
    parser.add_argument(
        "--again", action="store_true", help="also add conversations that were forgotten"
    )


def build(args: argparse.Namespace) -> int:
    """Add conversations, then select."""
    added = _add(args)
    result = _select(args)
    report = added._asdict() | {"selected": _plain(result)}
    print_report(args, report, [_add_text(added), _select_text(result)])
    return 0


def add(args: argparse.Namespace) -> int:
    """Add the conversations of chat exports."""
    added = _add(args)
    print_report(args, added._asdict(), [_add_text(added)])
    return 0


def select(args: argparse.Namespace) -> int:
    """Select the pairs to search."""
    result = _select(args)
    print_report(args, _plain(result), [_select_text(result)])
    return 0


# -- internals -----------------------------------------------------------------------------------


def _add(args: argparse.Namespace) -> IngestCounts:
    from llmaas_plugins.knn_lm.archive.archive import Archive
    from llmaas_plugins.knn_lm.build.encoder import Encoder
    from llmaas_plugins.knn_lm.build.ingest import add_conversations, binding_of

    found = _conversations(args)
    args.model = as_loaded(args.model, args.config)
    stopped = "what was added is kept; repeat the command to add the rest"
    with contextlib.ExitStack() as opened:
        natives = _Natives()
        llama = opened.enter_context(_loaded(args, natives))
        directory, key = datastore_directory(args), _key(args)
        archive = opened.enter_context(
            Archive.open(directory, binding_of(llama, key, natives.load), writable=True)
        )
        encoder = opened.enter_context(Encoder(llama, natives.contexts, key, args.threads or 0))
        opened.enter_context(stoppable(stopped))
        n_characters = sum(conversation.n_characters for conversation, _ in found)
        bar = opened.enter_context(progress_bar("reading", "character", n_characters))
        return add_conversations(
            archive, llama, encoder, found, progress=bar.update, again=args.again
        )


def _key(args: argparse.Namespace) -> States:
    """Return the kind of keys: that of an existing datastore, or the configured one."""
    from llmaas_plugins.knn_lm.archive.archive import Archive

    with contextlib.suppress(StoreError), Archive.open(datastore_directory(args)) as archive:
        if archive.binding is not None:
            return archive.binding.key_kind
    return datastore_settings(args).key


def _select(args: argparse.Namespace) -> BuildResult:
    from llmaas_plugins.knn_lm.archive.archive import Archive
    from llmaas_plugins.knn_lm.build.archive_source import SelectionParams
    from llmaas_plugins.knn_lm.build.build_datastore import build_datastore

    with contextlib.ExitStack() as opened:
        archive = opened.enter_context(Archive.open(datastore_directory(args), writable=True))
        settings = datastore_settings(args)
        params = SelectionParams(
            args.size or settings.size,
            settings.k,
            settings.dims,
            args.seed,
            args.how or settings.how,
        )
        opened.enter_context(stoppable("the earlier selection is unchanged"))
        total = min(params.size, archive.n_pairs)
        bar = opened.enter_context(progress_bar("selecting", "pair", total))
        return build_datastore(archive, params, bar.update)


def _conversations(args: argparse.Namespace) -> list[tuple[Conversation, str]]:
    """Return the conversations to add, each with the name of its source.

    Raises:
        ConfigError: No source was given, or a source cannot be read.
    """
    from llmaas_plugins.chats.exports import Conversation, Message, load_conversations

    if not args.exports and args.service_log is None:
        raise ConfigError("nothing to add: name a chat export, or --service-log DIR")
    found = [(one, path.name) for path in args.exports for one in load_conversations(path)]
    if args.service_log is not None:
        from llmaas_plugins.service.context_log import read_log

        for record in read_log(args.service_log):
            messages = tuple(Message(m["role"], m["content"]) for m in record.messages)  # type: ignore[arg-type]
            if messages:
                found.append((Conversation(record.id, record.app, messages), "service"))
    return found if args.characters is None else _first(found, args.characters)


def _first(
    found: list[tuple[Conversation, str]], n_characters: int
) -> list[tuple[Conversation, str]]:
    """Return the first conversations, until they have this many characters together."""
    ends = list(accumulate(one.n_characters for one, _ in found))
    n = bisect_left(ends, n_characters) + 1
    if n < len(found):
        print(f"{counted(len(found) - n, 'conversation')} left for later.", file=sys.stderr)
    return found[:n]


@contextlib.contextmanager
def _loaded(args: argparse.Namespace, natives: _Natives) -> Iterator[Any]:
    """Load the model with the hook point in its engine, but without plugins."""
    from llama_cpp import Llama

    from llmaas_plugins.activation import activate

    for path in filter(None, (args.model, args.lora)):
        check_file(path)
    with activate(Config(on_error="raise"), {"datastore": natives}):
        with load_errors(args.model):
            llama = Llama(
                str(args.model),
                n_ctx=args.n_ctx or min(_N_CTX, trained_context(args.model) or _N_CTX),
                n_threads=args.threads,
                n_threads_batch=args.threads,
                lora_path=str(args.lora) if args.lora else None,
                lora_scale=args.lora_scale,
                chat_format=args.chat_format,
                verbose=False,
            )
        with contextlib.closing(llama):
            yield llama


def _plain(result: BuildResult) -> dict[str, Any]:
    """Return the summary as JSON values, with None for numbers that could not be measured."""
    plain = dataclasses.asdict(result) | {"mixture": result.mixture.as_json()}
    return {name: None if _is_unknown(value) else value for name, value in plain.items()}


def _is_unknown(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _add_text(added: IngestCounts) -> str:
    text = f"{counted(added.n_added, 'conversation')} added, {counted(added.n_pairs, 'pair')}"
    text += f"; {added.n_known:,} stored already" if added.n_known else ""
    text += (
        f"; {added.n_left_out:,} skipped: too short, or hidden states beyond float16"
        if added.n_left_out
        else ""
    )
    refused = f"; {added.n_refused:,} skipped: refused by the model's chat template"
    text += refused if added.n_refused else ""
    forgotten = f"; {added.n_forgotten:,} skipped: forgotten before (--again adds them)"
    return text + (forgotten if added.n_forgotten else "") + "."


def _select_text(result: BuildResult) -> str:
    text = f"{result.n_pairs:,} of {result.n_full:,} pairs selected"
    if _is_unknown(result.perplexity):
        return text + "; too few conversations to measure their effect."
    return (
        f"{text}; held-out perplexity {result.perplexity_alone:.2f} without them, "
        f"{result.perplexity:.2f} with them; {result.skipped:.0%} of searches can be skipped."
    )
