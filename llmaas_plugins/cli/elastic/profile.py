"""``llmaas elastic profile``: latency of each level on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError, LlmaasError
from llmaas_plugins.cli.interrupts import stoppable
from llmaas_plugins.cli.models import add_model_action, identified, trained_context
from llmaas_plugins.cli.output import print_report, printable, progress_bar

if TYPE_CHECKING:
    from llama_cpp import Llama

    from llmaas_plugins.elastic.latency import Curves, Latency

__all__ = ["add_profile", "profile"]

_MOST_THREADS = 512  # limit of ggml
_LEAST_PROMPT, _MOST_PROMPT = 8, 1 << 24


def add_profile(actions: Any) -> None:
    """Register ``profile``."""
    parser = add_model_action(
        actions,
        "profile",
        profile,
        "measure the latency of each level on this machine",
        "Measure the time to the first token and the time of each further token at each level of a "
        "prepared model, for several prompt lengths and numbers of threads, and keep the results.",
        is_prepared=True,
        is_loaded=True,
    )
    parser.add_argument(
        "--table",
        choices=("searched", "uniform"),
        help="widths to measure (default: searched, if the model has them)",
    )
    parser.add_argument(
        "--threads",
        type=_numbers(1, _MOST_THREADS),
        default=_default_threads(),
        metavar="N,…",
        help="numbers of threads (default: half of the processors, as Llama uses for single "
        "tokens, and all of them, as for prompts)",
    )
    parser.add_argument(
        "--prompts",
        type=_numbers(_LEAST_PROMPT, _MOST_PROMPT),
        default=(32, 64, 128, 256, 512),
        metavar="N,…",
        help="prompt lengths in tokens, at least two (default 32,64,128,256,512)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _default_threads() -> tuple[int, ...]:
    """Return the numbers of threads that ``Llama`` uses by default, for tokens and for prompts."""
    n_all = os.cpu_count() or 1
    return tuple(sorted({max(n_all // 2, 1), n_all}))


def profile(args: argparse.Namespace) -> int:
    """Measure a prepared model's latency, print it, and keep it."""
    _check_lengths(args.prompts)
    with stoppable("nothing was kept"):
        latency, path = _measured(args)
        report = {
            "path": str(path),
            **latency.model_dump(mode="json"),
            "ttft_errors": latency.ttft.errors().model_dump(),
            "tpot_errors": latency.tpot.errors().model_dump(),
        }
        print_report(args, report, _text(latency))
        latency.save(path)
    if not args.json:
        print(f"kept in {path}")
    return 0


def _check_lengths(lengths: Sequence[int]) -> None:
    """Refuse lengths between which latency cannot be interpolated, or interpolation not checked."""
    if len(lengths) < 2:
        raise ConfigError("--prompts needs at least two lengths, to interpolate between them.")
    for shorter, longer in pairwise(lengths):
        if longer - shorter < 2:
            raise ConfigError(
                f"--prompts has {shorter} and {longer}, with no length between them at which to "
                "measure the error of interpolation. Leave one of the two out."
            )


def _measured(args: argparse.Namespace) -> tuple[Latency, Path]:
    """Return a model's latency, and the path at which to keep it."""
    from llmaas_plugins.elastic.latency import check_writable, latency_path
    from llmaas_plugins.elastic.profiling import ProfilePlan
    from llmaas_plugins.elastic.profiling import profile as measure

    n_trained = trained_context(args.model)
    if n_trained is not None and args.prompts[-1] > n_trained:
        raise ConfigError(
            f"--prompts has {args.prompts[-1]:,} tokens, expected at most the {n_trained:,} tokens "
            f"with which {args.model} was trained."
        )
    with _opened(args) as (llama, model):
        path = latency_path(args.model, model["table"], identified(args.model))
        check_writable(path)
        plan = ProfilePlan(
            args.model.name, model["table"], model["levels"], args.threads, args.prompts
        )
        with progress_bar("measuring", "prompt", plan.n_runs) as bar:

            def progress(n_left: int) -> None:
                bar.total = bar.n + 1 + n_left
                bar.update()

            return measure(llama, plan, progress), path


@contextlib.contextmanager
def _opened(args: argparse.Namespace) -> Iterator[tuple[Llama, dict[str, Any]]]:
    """Open a prepared model with room for the longest prompt; yield it with the plugin's report.

    Raises:
        ConfigError: The model has no levels, or lacks this table, or llama.cpp cannot open it.
    """
    from llmaas_plugins.activation import activate

    with (
        activate({"on_error": "raise", "plugins": {"elastic": {"table": args.table}}}) as suite,
        contextlib.closing(_llama(args.model, max(args.prompts))) as llama,
    ):
        plugin = suite.plugin("elastic")
        if (problem := plugin.problem()) is not None:
            raise ConfigError(f"{args.model} cannot be profiled: {problem}.")
        (model,) = plugin.llmaas_status()["models"].values()
        yield llama, model


def _llama(model: Path, n_prompt: int) -> Llama:
    from llama_cpp import Llama

    from llmaas_plugins.elastic.profiling import N_TOKENS

    n_ctx = n_prompt + N_TOKENS + 2
    try:
        return Llama(str(model), n_ctx=n_ctx, verbose=False)
    except LlmaasError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"llama.cpp cannot open {model} with a context of {n_ctx:,} tokens: {error}. If memory "
            "is short, use shorter --prompts."
        ) from error


# -- text ----------------------------------------------------------------------------------------


def _text(latency: Latency) -> Iterator[str]:
    machine = latency.machine
    yield (
        f"{printable(latency.model)}, widths {latency.table}, on {machine.n_cpus} × {machine.cpu}, "
        f"llama-cpp-python {machine.llama_cpp}"
    )
    for thread, n_threads in enumerate(latency.threads):
        yield ""
        yield f"{n_threads} thread{'s' if n_threads > 1 else ''}, ms ± half the spread of all runs"
        yield from _table(latency, thread)
    yield ""
    for name, curves in (("first token", latency.ttft), ("tokens", latency.tpot)):
        errors = curves.errors()
        yield (
            f"interpolated times of the {name} have errors of {100 * errors.median:.1f} % in the "
            f"median, {100 * errors.largest:.1f} % at most"
        )


def _table(latency: Latency, thread: int) -> Iterator[str]:
    heads = [
        f"{what} {n}"
        for what, curves in (("prompt of", latency.ttft), ("token after", latency.tpot))
        for n in curves.n_tokens
    ]
    rows = [["level", *heads]]
    for level, share in enumerate(latency.levels):
        cells = [cell for c in (latency.ttft, latency.tpot) for cell in _cells(c, thread, level)]
        rows.append([f"{share:.1f}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _cells(curves: Curves, thread: int, level: int) -> list[str]:
    times, spreads = curves.ms[thread][level], curves.spread_ms[thread][level]
    return [f"{ms:.1f} ± {spread / 2:.1f}" for ms, spread in zip(times, spreads, strict=True)]


def _numbers(least: int, most: int) -> Any:
    def parsed(text: str) -> tuple[int, ...]:
        try:
            numbers = sorted({int(part) for part in text.split(",")})
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected integers such as 32,128, found {text!r}"
            ) from None
        if numbers[0] < least:
            raise argparse.ArgumentTypeError(f"{numbers[0]} is below {least}")
        if numbers[-1] > most:
            raise argparse.ArgumentTypeError(f"{numbers[-1]} is above {most}")
        return tuple(numbers)

    return parsed
