"""Small apps, each of which uses one feature: ``python -m llmaas_eval.sizes.app NAME``.

An app runs in a folder with the model. Its last line says what it found, or why it was refused.
Exit status 2 means that the feature was refused, as in the command ``llmaas``, and 1 that an answer
is another one than stock llama.cpp's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmaas_eval.sizes.features import ELASTIC, MODEL
from llmaas_hooks import LlmaasError, common_prefix
from llmaas_plugins import activate, deadlines, elastic, short_prompts
from llmaas_plugins.flash_weights.model_sizes import metadata_of
from llmaas_plugins.machine import resident_bytes

__all__ = ["main"]

_PROMPT, _N_ANSWER, _N_CTX = tuple(range(300, 332)), 8, 512
_CONTEXT = tuple(range(300, 700))
_LONG_CTX, _LEFT = 8192, 64
"""Tokens of a long context, unless the model was trained with less; the part that stays free."""
_PACKED, _VANILLA = Path(MODEL).with_suffix(".packed"), Path("vanilla.json")
_LONG = Path("vanilla-long.json")
"""Packed weights; answers of stock llama.cpp, with which others are compared, and its answer to a
long context."""
_N_WORDS = 3000
"""Different tokens of a long context."""
_SHARE, _OVERHEAD_BYTES = 0.6, 192 << 20
"""Share of the weights that a streamed model has in memory, and memory for all else."""
_STORE = {"store": "kv", "codec": "lossless"}
_TEXT = "The committee met on Tuesday, and Ana of the town council wrote down what was said. "


class _RefusedError(LlmaasError):
    """A feature that the suite did not use, with its reason."""


class _OtherAnswerError(Exception):
    """An answer that is not stock llama.cpp's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run an app; return 0, 1 if its answer is wrong, or 2 if its feature was refused."""
    (name,) = sys.argv[1:] if argv is None else argv
    try:
        sys.stdout.write(f"{_APPS[name]()}\n")
    except LlmaasError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    except _OtherAnswerError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


# -- apps ----------------------------------------------------------------------------------------


def _vanilla() -> str:
    llama, seconds = _timed(_llama)
    answers, asked_s = _timed(lambda: [_answer(llama, _PROMPT), _answer(llama, _CONTEXT)])
    _VANILLA.write_text(json.dumps(answers))
    return f"opened in {seconds:.1f} s, answered in {asked_s:.1f} s"


def _vanilla_long() -> str:
    prompt = _long_context()
    llama = _llama(n_ctx=len(prompt) + _LEFT)
    answer, seconds = _timed(lambda: _answer(llama, prompt))
    _LONG.write_text(json.dumps([answer]))
    return f"{len(prompt)} tokens answered in {seconds:.1f} s"


def _identify() -> str:
    from llmaas_plugins.model.digest import file_digest

    found, seconds = _timed(lambda: file_digest(MODEL))
    return f"{found[:12]} after {seconds:.1f} s"


def _open() -> str:
    with _plugged({"kv_chunks": _STORE}) as (llama, status):
        answer, seconds = _timed(lambda: _answer(llama, _PROMPT))
        _check(status, "kv_chunks", "requests")
    return f"answered in {seconds:.1f} s, {_same(answer, 0)}"


def _save() -> str:
    with _plugged({"kv_chunks": _STORE}) as (llama, status):
        answer = _answer(llama, _CONTEXT)
        found = _check(status, "kv_chunks", "chunks")
    return f"{found['chunks']} chunks, {_same(answer, 1)}"


def _restore() -> str:
    with _plugged({"kv_chunks": _STORE}) as (llama, status):
        answer = _answer(llama, _CONTEXT)
        found = _check(status, "kv_chunks", "restored_tokens")
    return f"{found['restored_tokens']} tokens restored, {_same(answer, 1)}"


def _save_long() -> str:
    return _kept_long("chunks", "chunks")


def _restore_long() -> str:
    return _kept_long("restored_tokens", "tokens restored")


def _kept_long(figure: str, unit: str) -> str:
    """Answer a long context with ``kv_chunks``, which saves or restores it."""
    prompt = _long_context()
    with _plugged({"kv_chunks": _STORE}, n_ctx=len(prompt) + _LEFT) as (llama, status):
        answer, seconds = _timed(lambda: _answer(llama, prompt))
        found = _check(status, "kv_chunks", figure)
    same = _same(answer, 0, _LONG)
    return f"{found[figure]} {unit}, answered in {seconds:.1f} s, {same}"


def _shorten() -> str:
    settings = {"scorer": "attention", "least_tokens": 32}
    with _plugged({"short_prompts": settings}) as (llama, status):
        with short_prompts.share(0.5):
            llama(f"{_TEXT * 8}\n\nWhen did it meet?", max_tokens=_N_ANSWER)
        found = _check(status, "short_prompts", "prompts")
    return f"{found['tokens_read']} of {found['tokens']} tokens read"


def _mix() -> str:
    settings = {"store": "knn", "look_back": 0, "skip_above": 1.0, "share_across_apps": True}
    with _plugged({"knn_lm": settings}) as (llama, status):
        _answer(llama, _PROMPT)
        found = _check(status, "knn_lm", "mixed")
    return f"{found['mixed']} tokens mixed"


def _switch() -> str:
    with _plugged({"elastic": {}}, ELASTIC) as (llama, status):
        times = []
        for level in (1.0, 0.5, 0.2, 1.0):
            with elastic.level(level):
                times.append(f"{level}: {_timed(lambda: _answer(llama, _PROMPT))[1]:.1f} s")
        _check(status, "elastic", "switches")
    return ", ".join(times)


def _promise() -> str:
    with _plugged({"elastic": {}, "deadlines": {}}, ELASTIC) as (llama, status):
        with deadlines.slo(ttft="60 %", tpot="80 %"):
            _answer(llama, _CONTEXT)
        found = _check(status, "deadlines", "last")
    return f"levels by phase: {_levels(found)}"


def _stream(mode: Mapping[str, object] | None = None, *counts: str) -> str:
    """Answer with streamed weights; refuse if none of these counts of the model is above 0."""
    budget = int(_SHARE * Path(MODEL).stat().st_size) + resident_bytes() + _OVERHEAD_BYTES
    settings = {"memory_budget": budget, **(mode or {})}
    with _plugged({"flash_weights": settings}) as (llama, status):
        answer, seconds = _timed(lambda: _answer(llama, _PROMPT))
        found = _check(status, "flash_weights", "models")
    (model,) = found["models"]
    if counts and not any(model[count] for count in counts):
        raise _RefusedError(f"flash_weights has no {counts[0]}: {model}")
    held, whole = found["held_bytes"] / 1e9, found["weight_bytes"] / 1e9
    is_equal = not mode and _PACKED.exists()  # without it, weights are not repacked
    how = f", {_same(answer, 0)}" if is_equal else ""
    return f"{held:.2f} GB of {whole:.2f} GB held, answered in {seconds:.1f} s{how}"


def _sparse() -> str:
    return _stream({"mode": "sparse"}, "channel_hits", "channel_misses")


_APPS: Mapping[str, Callable[[], str]] = {
    "vanilla": _vanilla,
    "vanilla-long": _vanilla_long,
    "identify": _identify,
    "open": _open,
    "save": _save,
    "restore": _restore,
    "save-long": _save_long,
    "restore-long": _restore_long,
    "shorten": _shorten,
    "mix": _mix,
    "switch": _switch,
    "promise": _promise,
    "stream": _stream,
    "sparse": _sparse,
}

# -- inside --------------------------------------------------------------------------------------


@contextmanager
def _plugged(
    plugins: Mapping[str, Mapping[str, object]], model: str = MODEL, n_ctx: int = _N_CTX
) -> Iterator[tuple[Any, Callable[[], dict[str, Any]]]]:
    """Open a model with plugins; yield it and a function that returns the plugins' reports."""
    with activate({"on_error": "raise", "plugins": plugins}) as suite:
        llama = _llama(model, n_ctx)
        try:
            yield llama, lambda: suite.status()["plugins"]
        finally:
            llama.close()


def _llama(model: str = MODEL, n_ctx: int = _N_CTX) -> Any:
    from llama_cpp import Llama

    return Llama(model, n_ctx=n_ctx, n_threads=2, n_threads_batch=2, verbose=False)


def _long_context() -> tuple[int, ...]:
    """Return a prompt as long as the model was trained for, but of ``_LONG_CTX`` tokens at most."""
    n_trained = metadata_of(Path(MODEL)).n_trained
    n = min(_LONG_CTX, n_trained or _LONG_CTX) - _LEFT
    return tuple(300 + i % _N_WORDS for i in range(n))


def _answer(llama: Any, prompt: Sequence[int]) -> list[int]:
    llama.reset()  # the beginning of an earlier prompt would divide this one into other batches
    generator = llama.generate(list(prompt), temp=0.0)
    try:
        return [next(generator) for _ in range(_N_ANSWER)]
    finally:
        generator.close()


def _check(status: Callable[[], dict[str, Any]], plugin: str, figure: str) -> dict[str, Any]:
    """Return a plugin's report.

    Raises:
        _RefusedError: The plugin did nothing: this figure of its report is zero or empty.
    """
    found: dict[str, Any] = status()[plugin]
    if not found.get(figure):
        reasons = found.get("left_alone") or found
        raise _RefusedError(f"{plugin} has no {figure}: {reasons}")
    return found


def _same(answer: list[int], number: int, path: Path = _VANILLA) -> str:
    """Say that an answer is stock llama.cpp's.

    Raises:
        _OtherAnswerError: It is not.
    """
    expected = json.loads(path.read_text())[number]
    if answer != expected:
        n_equal = common_prefix(np.array(answer), np.array(expected))
        message = f"another answer than stock llama.cpp from token {n_equal + 1} of {len(expected)}"
        raise _OtherAnswerError(message)
    return "the same answer"


def _levels(report: Mapping[str, Any]) -> str:
    """Return the levels of the last request's phases.

    Raises:
        _RefusedError: A phase was not planned.
    """
    (last,) = report["last"].values()
    phases = {phase: last.get(phase) for phase in ("ttft", "tpot")}
    if unplanned := [phase for phase, found in phases.items() if not found]:
        raise _RefusedError(f"deadlines has not planned {' and '.join(unplanned)}: {last}")
    return ", ".join(f"{phase} {found['level']}" for phase, found in phases.items())


def _timed(do: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return do(), time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
