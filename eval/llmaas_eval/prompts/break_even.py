"""``python -m llmaas_eval.prompts.break_even``: from which length on a shorter prompt is faster.

    llmaas elastic profile model.elastic.gguf --prompts 128,256,512,1024,2048,4096
    python -m llmaas_eval.prompts.break_even model.elastic.gguf --encoder 128:4.1 512:16.5

Nothing is measured here. The times of whole and shorter prompts are those that ``llmaas elastic
profile`` keeps. Narrow attention reads the whole prompt at the narrowest level. The encoder's times
are given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmaas_eval.prompts.report import report
from llmaas_eval.prompts.rows import Row
from llmaas_eval.results import write
from llmaas_hooks import LlmaasError
from llmaas_plugins.elastic.latency import Latency, latency_path
from llmaas_plugins.elastic.metadata import read_elastic

__all__ = ["break_even", "main", "rows_of_model"]

_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
_SHARE, _STEPS = 0.5, 100
"""Share of a prompt that the table shows, and number of shares that are tried."""

Ms = Callable[[int], float]
"""Function that returns milliseconds for a number of tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, print the table and write the output; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m llmaas_eval.prompts.break_even",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("models", type=Path, nargs="+", help="prepared models that were profiled")
    add(
        "--encoder",
        nargs="+",
        type=_pair,
        metavar="TOKENS:MS",
        help="measured times of the encoder",
    )
    add("--lengths", type=int, nargs="+", default=_LENGTHS, help="tokens of prompts")
    add("--threads", type=int, help="threads of the profile; default: the most")
    add("-o", "--out", type=Path, default=Path("build/prompts"), help="folder; %(default)s")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for model in args.models:
        try:
            latency = _latency(model)
            n_threads = args.threads or max(latency.threads)
            scorers = _scorers(latency, n_threads, args.encoder)
            rows += rows_of_model(latency, n_threads, args.lengths, scorers)
        except (LlmaasError, ValueError) as error:
            parser.error(str(error))
    settings = {"study": "break_even", "encoder": args.encoder}
    text = write(args.out / "break_even", settings, rows, report)
    sys.stdout.write(f"{text}\n")
    return 0


def rows_of_model(
    latency: Latency, n_threads: int, lengths: Sequence[int], scorers: Mapping[str, Ms]
) -> Iterator[Row]:
    """Yield a row for each length and scorer.

    Args:
        latency: Times of the model.
        n_threads: Number of threads, one of the profile's.
        lengths: Numbers of tokens of prompts.
        scorers: Times of scorers by name.
    """
    longest = max((*latency.ttft.n_tokens, *latency.ttft.held))

    def whole(n_tokens: int) -> float:
        return latency.ttft_ms(1.0, n_tokens, n_threads)

    for n_tokens in lengths:
        for scorer, ms in scorers.items():
            shorter = ms(n_tokens) + whole(int(_SHARE * n_tokens))
            fitting = [
                level
                for level in latency.levels
                if latency.ttft_ms(level, n_tokens, n_threads) <= shorter
            ]
            yield {
                "model": latency.model,
                "n_threads": n_threads,
                "n_tokens": n_tokens,
                "is_measured": n_tokens <= longest,
                "scorer": scorer,
                "whole_ms": whole(n_tokens),
                "scorer_ms": ms(n_tokens),
                "shorter_ms": shorter,
                "share": break_even(whole, ms(n_tokens), n_tokens),
                "level": max(fitting, default=None),
            }


def break_even(whole: Ms, scorer_ms: float, n_tokens: int) -> float | None:
    """Return the largest share of a prompt that, with its scorer, is faster than all of it.

    Returns:
        The share in steps of 1 %; None if even the scorer alone takes as long.
    """
    limit = whole(n_tokens)
    shares = (step / _STEPS for step in range(_STEPS - 1, 0, -1))
    faster = (one for one in shares if scorer_ms + whole(max(1, int(one * n_tokens))) < limit)
    return next(faster, None)


# -- inside --------------------------------------------------------------------------------------


def _latency(model: Path) -> Latency:
    """Return the times of a model on this machine.

    Raises:
        ConfigError: The model is not prepared.
        StoreError: A file cannot be read.
        ValueError: The model was not profiled.
    """
    elastic = read_elastic(model)
    table = "searched" if elastic is not None and "searched" in elastic.tables else "uniform"
    found = Latency.load(latency_path(model, table))
    if found is None:
        raise ValueError(f"{model} has no times; `llmaas elastic profile {model}` measures them")
    return found


def _scorers(
    latency: Latency, n_threads: int, encoder: Sequence[tuple[int, float]] | None
) -> dict[str, Ms]:
    narrowest = min(latency.levels)
    scorers: dict[str, Ms] = {
        "narrow attention": lambda n: latency.ttft_ms(narrowest, n, n_threads)
    }
    if encoder:
        scorers["encoder"] = _line(encoder)
    return scorers


def _line(pairs: Sequence[tuple[int, float]]) -> Ms:
    """Return times between and beyond measured ones, in proportion beyond the longest."""
    numbers, times = zip(*sorted(pairs), strict=True)

    def ms(n_tokens: int) -> float:
        if n_tokens > numbers[-1]:
            return float(times[-1] * n_tokens / numbers[-1])
        return float(np.interp(n_tokens, (0, *numbers), (0, *times)))

    return ms


def _pair(text: str) -> tuple[int, float]:
    """Parse ``TOKENS:MS``."""
    n_tokens, _, ms = text.partition(":")
    if int(n_tokens) < 1 or float(ms) < 0:
        raise ValueError(text)
    return int(n_tokens), float(ms)


if __name__ == "__main__":
    sys.exit(main())
