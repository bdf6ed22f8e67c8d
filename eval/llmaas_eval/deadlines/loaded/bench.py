"""Model, questions and times that all probes share. They are made once in the study's folder."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_cpp import Llama
from tqdm import tqdm

from llmaas_eval.deadlines.loaded.limits import Idle, Size, Times, times_of
from llmaas_eval.deadlines.loaded.load import Answer, Call, Limits, ask
from llmaas_eval.deadlines.loaded.questions import AppQuestions
from llmaas_eval.deadlines.loaded.service import Service, serving
from llmaas_eval.deadlines.loaded.systems import KINDS, SYSTEMS, Kind, System
from llmaas_eval.deadlines.loaded.traces import APP_NAMES
from llmaas_eval.deadlines.model import write_model
from llmaas_eval.models import SHAPE_1B, SHAPE_200M, SHAPE_TINY
from llmaas_plugins.cli.main import main as llmaas
from llmaas_plugins.elastic.latency import Latency, latency_path

__all__ = ["SHAPES", "Bench", "opened", "profiled_model", "replace_json", "warm_up"]

SHAPES = {"200m": SHAPE_200M, "1b": SHAPE_1B, "tiny": SHAPE_TINY}
"""Shapes of the random model; the tiny one is only for checks."""
_TABLE = "uniform"
_LENGTHS = "16,32,64,128,256,512"
_QUICK_LENGTHS = "16,64,256"
_WORD = " and"
_CHUNK = 16
"""Tokens of the pieces in which ``kv_chunks`` stores prompts."""
_N_IDLE_ANSWER = 16
_N_WARM_UPS = 30
_NO_LIMITS = Limits(1e9, 1e9)
_EASY = Limits(60_000.0, 60_000.0)


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that does not depend on the system.

    Attributes:
        model: Prepared model.
        apps: Questions by app.
        count: Function that counts the tokens of a prompt.
        word: Token that all answers repeat.
        times: Times on an idle machine.
    """

    model: Path
    apps: Mapping[str, AppQuestions]
    count: Callable[[str], int]
    word: int
    times: Times

    def prompt(self, app: str, question: int, kind: Kind, nonce: str) -> str:
        """Return a prompt; a cold one begins with a nonce, so that nothing of it can be reused."""
        return _prompt(self.apps[app], question, kind, nonce)

    def size(self, app: str, question: int) -> Size:
        """Return the tokens of a prompt."""
        return _size(self.apps[app], question, self.count)


def opened(folder: Path, apps: Mapping[str, AppQuestions], n_idle: int, shape: str) -> Bench:
    """Make the model, its profile and the times on an idle machine, unless they are there.

    Args:
        folder: Folder of the study.
        apps: Questions by app.
        n_idle: Requests of each app and kind to measure on the idle service.
        shape: One of ``SHAPES``.

    Raises:
        RuntimeError: The model cannot be profiled, or the service does not start.
    """
    model, latency = profiled_model(folder, shape)
    with contextlib.closing(Llama(str(model), vocab_only=True, verbose=False)) as llama:
        word = llama.tokenize(_WORD.encode(), add_bos=False)[-1]
    count = _counter(model)
    measured = _idle(folder / "idle.json", model, apps, count, word, n_idle)
    return Bench(model, apps, count, word, times_of(latency, measured))


def profiled_model(folder: Path, shape: str) -> tuple[Path, Latency]:
    """Make the prepared random model and its profile, unless they are there.

    Args:
        folder: Folder for the model.
        shape: One of ``SHAPES``.

    Raises:
        RuntimeError: The model cannot be profiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "random.elastic.gguf"
    if not model.exists():
        write_model(folder, SHAPES[shape])
        (folder / "random.gguf").unlink()
    return model, _profiled(model, _QUICK_LENGTHS if shape == "tiny" else _LENGTHS)


def warm_up(service: Service, system: System, kind: Kind, bench: Bench) -> None:
    """Ask one question of each app, so that prefixes are stored; wait until requests are planned.

    Raises:
        RuntimeError: A request fails, or none is planned after half a minute.
    """
    _warm_up(service, system, kind, bench.apps, bench.word)


def replace_json(path: Path, document: Any) -> None:
    """Write a JSON file, replacing an existing one at once."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document), encoding="utf-8")
    partial.replace(path)


# -- inside --------------------------------------------------------------------------------------


def _profiled(model: Path, lengths: str) -> Latency:
    path = latency_path(model, _TABLE)
    if (found := Latency.load(path)) is None:
        if llmaas(["elastic", "profile", str(model), "--table", _TABLE, "--prompts", lengths]):
            raise RuntimeError(f"{model} cannot be profiled")
        found = Latency.load(path)
    assert found is not None
    return found


def _counter(model: Path) -> Callable[[str], int]:
    """Return a function that counts a prompt's tokens, with the token that begins it."""
    llama = Llama(str(model), vocab_only=True, verbose=False)
    return lambda text: len(llama.tokenize(text.encode(), add_bos=True, special=True))


def _prompt(app: AppQuestions, question: int, kind: Kind, nonce: str) -> str:
    prompt = app.prompt(question)
    return f"{nonce}\n{prompt}" if kind == "cold" else prompt


def _size(app: AppQuestions, question: int, count: Callable[[str], int]) -> Size:
    n_cold = count(_prompt(app, question, "cold", "1-2-3"))
    n_stored = count(app.prefix) // _CHUNK * _CHUNK
    return Size(n_cold, count(app.prompt(question)) - n_stored)


def _idle(  # noqa: PLR0913, PLR0917  the parts of a bench that is not complete
    path: Path,
    model: Path,
    apps: Mapping[str, AppQuestions],
    count: Callable[[str], int],
    word: int,
    n_each: int,
) -> list[Idle]:
    """Measure single requests of the whole model, or read what was measured before."""
    if path.exists():
        return [Idle(**row) for row in json.loads(path.read_text("utf-8"))]
    system, found = SYSTEMS["fifo-whole"], list[Idle]()
    total = len(KINDS) * n_each * len(APP_NAMES)
    with tqdm(total=total, desc="idle", unit="request", disable=None) as bar:
        for kind in KINDS:
            with _started(system, kind, model) as service:
                _warm_up(service, system, kind, apps, word)
                for i in range(n_each):
                    for app in APP_NAMES:
                        question = (i + 1) % len(apps[app].questions)
                        prompt = _prompt(apps[app], question, kind, f"idle-{i}")
                        size = _size(apps[app], question, count)
                        answer = _asked(service, app, prompt, word)
                        n_prompt = size.n_cold if kind == "cold" else size.n_warm
                        found.append(
                            Idle(app, kind, n_prompt, answer.ttft_ms or 0.0, answer.tpot_ms or 0.0)
                        )
                        bar.update()
    replace_json(path, [one._asdict() for one in found])
    _tell(found)
    return found


def _tell(found: list[Idle]) -> None:
    for kind in KINDS:
        some = [one for one in found if one.kind == kind]
        first, further = (
            statistics.median(getattr(one, name) for one in some) for name in ("ttft_ms", "tpot_ms")
        )
        tqdm.write(f"idle, {kind}: first token {first:.0f} ms, further tokens {further:.1f} ms")


@contextlib.contextmanager
def _started(system: System, kind: Kind, model: Path) -> Iterator[Service]:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(system, kind, model, Path(folder)) as service,
    ):
        yield service


def _warm_up(
    service: Service, system: System, kind: Kind, apps: Mapping[str, AppQuestions], word: int
) -> None:
    names_promise = system.levels == "planned" or system.is_scheduled
    limits = _EASY if names_promise else _NO_LIMITS
    for app in APP_NAMES:
        prompt = _prompt(apps[app], 0, kind, "warm-up")
        _asked(service, app, prompt, word, limits, names_promise=names_promise)
        if system.shortens:  # so that the scorer's time is known
            _asked(service, app, prompt, word, limits, names_promise=names_promise, share=0.5)
    if not names_promise:
        return
    for i in range(_N_WARM_UPS):  # plans begin once the model's file was identified
        if any(record.is_planned for record in service.records().values()):
            return
        prompt = _prompt(apps[APP_NAMES[-1]], 0, kind, f"warm-up {i}")
        _asked(service, APP_NAMES[-1], prompt, word, limits, names_promise=True)
        service.settle()
    raise RuntimeError("no request was planned; are `deadlines` and `elastic` on?")


def _asked(  # noqa: PLR0913  one parameter for each part of a call
    service: Service,
    app: str,
    prompt: str,
    word: int,
    limits: Limits = _NO_LIMITS,
    *,
    names_promise: bool = False,
    share: float | None = None,
) -> Answer:
    call = Call(0, app, prompt, _N_IDLE_ANSWER, word, limits, names_promise, None, share=share)
    answer = ask(service, call)
    if answer.error is not None:
        raise RuntimeError(f"`llmaas serve` fails to answer: {answer.error}")
    return answer
