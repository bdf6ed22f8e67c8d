"""``llmaas elastic profile``: what each level costs on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.output import print_report, progress_bar

if TYPE_CHECKING:
    from llmaas_plugins.elastic.latency import Curves, Latency

__all__ = ["add_profile_options", "profile"]

_LEAST_PROMPT = 8


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    """Those of its own."""
    parser.add_argument(
        "--threads",
        type=_numbers(1),
        default=(max((os.cpu_count() or 1) // 2, 1),),
        metavar="N,…",
        help="numbers of threads (default: half of the processors, as Llama takes for tokens)",
    )
    parser.add_argument(
        "--prompts",
        type=_numbers(_LEAST_PROMPT),
        default=(32, 128, 512),
        metavar="N,…",
        help="lengths of prompts in tokens, two or more (default 32,128,512)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def profile(args: argparse.Namespace) -> int:
    """Measure a prepared model, keep the times, and print them."""
    from llmaas_plugins.elastic.latency import latency_path

    if len(args.prompts) < 2:
        raise ConfigError("--prompts needs two lengths or more, to interpolate between.")
    latency = _measured(args)
    path = latency_path(args.model, latency.table)
    latency.save(path)
    report = {
        "path": str(path),
        **latency.model_dump(mode="json"),
        "ttft_errors": latency.ttft.errors().model_dump(),
        "tpot_errors": latency.tpot.errors().model_dump(),
    }
    print_report(args, report, _text(latency, path))
    return 0


def _measured(args: argparse.Namespace) -> Latency:
    from llama_cpp import Llama

    from llmaas_plugins.activation import activate
    from llmaas_plugins.elastic.profiling import N_TOKENS, Plan
    from llmaas_plugins.elastic.profiling import profile as measure

    if not args.model.is_file():
        raise ConfigError(f"found no file {args.model}; expected a model in GGUF.")
    with contextlib.ExitStack() as opened:
        suite = opened.enter_context(activate({"on_error": "raise", "plugins": {"elastic": {}}}))
        n_ctx = max(args.prompts) + N_TOKENS + 2
        llama = opened.enter_context(
            contextlib.closing(Llama(str(args.model), n_ctx=n_ctx, verbose=False))
        )
        plugin = suite.plugin("elastic")
        if (problem := plugin.problem()) is not None:
            raise ConfigError(f"{args.model} cannot be profiled: {problem}.")
        (model,) = plugin.llmaas_status()["models"].values()
        plan = Plan(args.model.name, model["table"], model["levels"], args.threads, args.prompts)
        bar = opened.enter_context(progress_bar("measuring", "prompt", plan.n_runs))
        return measure(llama, plan, lambda: bar.update(1))


# -- how it is shown -----------------------------------------------------------------------------


def _text(latency: Latency, path: Path) -> Iterator[str]:
    machine = latency.machine
    yield (
        f"{latency.model}, widths {latency.table}, on {machine.n_cpus} × {machine.cpu}, "
        f"llama-cpp-python {machine.llama_cpp}"
    )
    for thread, n_threads in enumerate(latency.threads):
        yield ""
        yield f"{n_threads} thread{'s' if n_threads > 1 else ''}, ms ± spread of all runs / 2"
        yield from _table(latency, thread)
    yield ""
    for name, curves in (("first token", latency.ttft), ("tokens", latency.tpot)):
        errors = curves.errors()
        yield (
            f"interpolated times of the {name} are off by {100 * errors.median:.1f} % in the "
            f"median, {100 * errors.largest:.1f} % at most"
        )
    yield f"kept in {path}"


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


def _numbers(least: int) -> Any:
    def parsed(text: str) -> tuple[int, ...]:
        numbers = sorted({int(part) for part in text.split(",")})
        if numbers[0] < least:
            raise argparse.ArgumentTypeError(f"{numbers[0]} is below {least}")
        return tuple(numbers)

    parsed.__name__ = "list of numbers"  # what argparse calls a value that it cannot be made of
    return parsed
