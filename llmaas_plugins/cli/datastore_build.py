"""``llmaas datastore build``, ``add`` and ``select``: from chat exports to what is searched."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, ContextCreate, ModelLoad, StoreError, hookimpl
from llmaas_hooks.native import NativeContext, States
from llmaas_plugins.cli.datastore_settings import datastore_directory, datastore_settings
from llmaas_plugins.cli.ending import stoppable
from llmaas_plugins.cli.offline import trained_context
from llmaas_plugins.cli.output import counted, print_report, progress_bar
from llmaas_plugins.cli.store_actions import add_action
from llmaas_plugins.config import Config

if TYPE_CHECKING:
    from llmaas_plugins.chats import Conversation
    from llmaas_plugins.knn_lm.building import Added
    from llmaas_plugins.knn_lm.selecting import Selected

__all__ = ["add_actions"]

_N_CTX = 2048


class _Natives:
    """Keeps the contexts in which hidden states can be read, and how the model was opened."""

    def __init__(self) -> None:
        self.contexts: dict[int, NativeContext] = {}
        self.load: ModelLoad | None = None

    @hookimpl
    def llmaas_context_create(self, create: ContextCreate) -> None:
        """Keep how its model was opened."""
        self.load = create.load

    @hookimpl
    def llmaas_native_context(self, context: NativeContext) -> None:
        """Keep it."""
        self.contexts[context.ctx] = context


def add_actions(actions: Any) -> None:
    """Register the actions that make a datastore."""
    build_ = add_action(
        actions,
        "build",
        build,
        "add the conversations of chat exports, and select what is searched; what is in it "
        "already is passed over, so it can be stopped and run again",
    )
    add_ = add_action(
        actions, "add", add, "only add them; `llmaas datastore select` is for later, when all are"
    )
    select_ = add_action(
        actions, "select", select, "select anew from all that is there; it needs no model"
    )
    for parser in (build_, add_):
        _add_model_options(parser)
    for parser in (build_, select_):
        parser.add_argument(
            "--size",
            type=_positive,
            metavar="PAIRS",
            help="most pairs to select (default: as configured)",
        )
        parser.add_argument("--seed", type=int, default=0, help="of all chance (default 0)")


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
        help="add the chats of `llmaas serve`, too: its service.state_dir. What your model said "
        "there itself is learnt then",
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="GGUF", help="the model that your app uses"
    )
    parser.add_argument("--lora", type=Path, metavar="GGUF", help="and its adapter")
    parser.add_argument("--lora-scale", type=float, default=1.0, help="(default 1)")
    parser.add_argument("--chat-format", help="as in your app (default: what the model says)")
    parser.add_argument(
        "--n-ctx",
        type=_positive,
        help=f"tokens seen at a time (default {_N_CTX}, or what the model was trained with)",
    )
    parser.add_argument("--threads", type=_positive, help="CPU threads (default: all)")
    parser.add_argument(
        "--again", action="store_true", help="take conversations that were forgotten, too"
    )


def build(args: argparse.Namespace) -> int:
    """Add, then select."""
    added = _add(args)
    selected = _select(args)
    report = added._asdict() | {"selected": _plain(selected)}
    print_report(args, report, [_add_text(added), _select_text(selected)])
    return 0


def add(args: argparse.Namespace) -> int:
    """Add the conversations of exports."""
    added = _add(args)
    print_report(args, added._asdict(), [_add_text(added)])
    return 0


def select(args: argparse.Namespace) -> int:
    """Select what is searched."""
    selected = _select(args)
    print_report(args, _plain(selected), [_select_text(selected)])
    return 0


# -- inside --------------------------------------------------------------------------------------


def _add(args: argparse.Namespace) -> Added:
    from llmaas_plugins.knn_lm.archive import Archive
    from llmaas_plugins.knn_lm.building import add, binding_of
    from llmaas_plugins.knn_lm.encoding import Encoder

    found = _conversations(args)
    stopped = "what was added stays: the same command goes on with the rest"
    with contextlib.ExitStack() as opened:
        natives = _Natives()
        llama = opened.enter_context(_loaded(args, natives))
        directory, key = datastore_directory(args), _key(args)
        archive = opened.enter_context(
            Archive.open(directory, binding_of(llama, key, natives.load), writable=True)
        )
        encoder = opened.enter_context(Encoder(llama, natives.contexts, key, args.threads or 0))
        opened.enter_context(stoppable(stopped))
        bar = opened.enter_context(progress_bar("reading", "chat", len(found)))
        return add(archive, llama, encoder, found, progress=bar.update, again=args.again)


def _key(args: argparse.Namespace) -> States:
    """Which states are keys: those of the datastore that is there, or as configured."""
    from llmaas_plugins.knn_lm.archive import Archive

    with contextlib.suppress(StoreError), Archive.open(datastore_directory(args)) as archive:
        if archive.binding is not None:
            return archive.binding.key_kind
    return datastore_settings(args).key


def _select(args: argparse.Namespace) -> Selected:
    from llmaas_plugins.knn_lm.archive import Archive
    from llmaas_plugins.knn_lm.selecting import Plan, select

    with contextlib.ExitStack() as opened:
        archive = opened.enter_context(Archive.open(datastore_directory(args), writable=True))
        settings = datastore_settings(args)
        plan = Plan(args.size or settings.size, settings.k, settings.dims, args.seed)
        opened.enter_context(stoppable("what was selected before is as it was"))
        total = min(plan.size, archive.n_pairs)
        bar = opened.enter_context(progress_bar("selecting", "pair", total))
        return select(archive, plan, bar.update)


def _conversations(args: argparse.Namespace) -> list[tuple[Conversation, str]]:
    """What is to be added, each with where it is from.

    Raises:
        ConfigError: Nothing was named, or it cannot be read.
    """
    from llmaas_plugins.chats import Conversation, Message, load_conversations

    if not args.exports and args.service_log is None:
        raise ConfigError("nothing to add: name a chat export, or --service-log DIR")
    found = [(one, path.name) for path in args.exports for one in load_conversations(path)]
    if args.service_log is not None:
        from llmaas_plugins.service.contexts import read_log

        for record in read_log(args.service_log):
            messages = tuple(Message(m["role"], m["content"]) for m in record.messages)  # type: ignore[arg-type]
            if messages:
                found.append((Conversation(record.id, record.app, messages), "service"))
    return found


@contextlib.contextmanager
def _loaded(args: argparse.Namespace, natives: _Natives) -> Iterator[Any]:
    """The model, with the hook point in its engine and no plugin."""
    from llama_cpp import Llama

    from llmaas_plugins.activation import activate

    for path in filter(None, (args.model, args.lora)):
        if not path.is_file():
            raise ConfigError(f"no such model: {path}")
    with activate(Config(on_error="raise"), {"datastore": natives}):
        try:
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
        except ValueError as error:
            raise ConfigError(f"cannot load model {args.model}: {error}") from error
        with contextlib.closing(llama):
            yield llama


def _plain(selected: Selected) -> dict[str, Any]:
    """As JSON has it: nothing for what could not be measured."""
    plain = dataclasses.asdict(selected) | {"mixture": selected.mixture.as_json()}
    return {name: None if _is_unknown(value) else value for name, value in plain.items()}


def _is_unknown(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _add_text(added: Added) -> str:
    text = f"{counted(added.n_added, 'conversation')} added, {counted(added.n_pairs, 'pair')}"
    text += f"; {added.n_known:,} were in already" if added.n_known else ""
    text += (
        f"; {added.n_left_out:,} left out: too short, or with states beyond float16"
        if added.n_left_out
        else ""
    )
    refused = f"; {added.n_refused:,} that the model's chat template does not take"
    text += refused if added.n_refused else ""
    forgotten = f"; {added.n_forgotten:,} left out that were forgotten (--again takes them)"
    return text + (forgotten if added.n_forgotten else "") + "."


def _select_text(selected: Selected) -> str:
    text = f"{selected.n_pairs:,} of {selected.n_full:,} pairs selected"
    if _is_unknown(selected.perplexity):
        return text + "; too few conversations to measure what they are worth."
    return (
        f"{text}; perplexity of other conversations {selected.perplexity_alone:.2f} without them, "
        f"{selected.perplexity:.2f} with them; {selected.skipped:.0%} of searches can be skipped."
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number
