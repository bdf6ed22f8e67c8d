"""Probes: a trace served by a system at one rate. Each is kept in a file and not repeated."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from llmaas_eval.deadlines.loaded.bench import Bench, replace_json, warm_up
from llmaas_eval.deadlines.loaded.goodput import rate_of
from llmaas_eval.deadlines.loaded.limits import constant_levels, possible_share
from llmaas_eval.deadlines.loaded.load import Answer, Call, send
from llmaas_eval.deadlines.loaded.recorder import Record, key_of
from llmaas_eval.deadlines.loaded.service import serving
from llmaas_eval.deadlines.loaded.systems import LEAST_SHARE, SYSTEMS, Kind
from llmaas_eval.deadlines.loaded.traces import SHARES, Arrival, trace

__all__ = ["Case", "Probe", "Probes", "Served"]

_WHOLE = (1.0, 1.0)


class Case(NamedTuple):
    """A system that is measured on one kind of prompts and one mix of apps."""

    system: str
    kind: Kind
    alpha: float


class Served(NamedTuple):
    """A request of a probe.

    Attributes:
        number: Place in the trace.
        app: Name of the app.
        question: Index among the app's questions.
        ttft_ms: Measured time to the first token; None if there was none.
        tpot_ms: Measured mean time of each further token; None if there was none.
        has_ttft: Whether the time to the first token was kept.
        has_tpot: Whether the time of further tokens was kept.
        levels: Levels of prompt and answer.
        infeasible: Phases of which the service said that they may take longer than promised.
        n_reused: Prompt tokens that were not evaluated.
        error: Reason why the answer is incomplete; None if it is complete.
        share: Share of the prompt that the service was told to read.
    """

    number: int
    app: str
    question: int
    ttft_ms: float | None
    tpot_ms: float | None
    has_ttft: bool
    has_tpot: bool
    levels: Sequence[float]
    infeasible: Sequence[str]
    n_reused: int
    error: str | None
    share: float = 1.0

    @property
    def is_met(self) -> bool:
        """Whether both limits were kept."""
        return self.has_ttft and self.has_tpot

    @property
    def has_silent_miss(self) -> bool:
        """Whether a limit was missed that the service did not flag."""
        kept = {"ttft": self.has_ttft, "tpot": self.has_tpot}
        return any(not is_kept and name not in self.infeasible for name, is_kept in kept.items())


class Probe(NamedTuple):
    """Result of a trace at a rate.

    Attributes:
        case: Case.
        rate: Requests a second.
        served: Requests; empty if the probe ended early because too many missed.
        most_missed: Misses after which the probe ended, or would have.
    """

    case: Case
    rate: float
    served: Sequence[Served]
    most_missed: int | None

    def passes(self, share: float) -> bool:
        """Return whether at least this share of the requests kept both limits."""
        return bool(self.served) and self.met >= share * len(self.served)

    @property
    def met(self) -> int:
        """Number of requests that kept both limits."""
        return sum(one.is_met for one in self.served)


class Probes:
    """Probes of a bench, kept in a folder."""

    def __init__(self, bench: Bench, folder: Path, n_requests: int, seed: int) -> None:
        """Keep probes of ``n_requests`` requests each in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self._bench, self._folder = bench, folder
        self._n, self._seed = n_requests, seed

    def probe(self, case: Case, step: int, least_share: float | None = None) -> Probe:
        """Serve the trace at a rate, or read the result of an earlier run.

        Args:
            case: Case.
            step: Step of the rate.
            least_share: Share of met requests below which the rest of the trace does not matter;
                None if it does.
        """
        name = f"{case.system}-{case.kind}-{case.alpha:g}-{step}.json"
        path = self._folder / name
        most = None if least_share is None else int(self._n - least_share * self._n + 1e-9)
        if path.exists():
            found = _read(path)
            if found.served or (most is not None and most <= (found.most_missed or 0)):
                return found
        found = self._measure(case, rate_of(step), most)
        document = found._asdict() | {"served": [one._asdict() for one in found.served]}
        replace_json(path, document)
        return found

    def done(self) -> list[Probe]:
        """Return all complete probes."""
        found = [_read(path) for path in sorted(self._folder.glob("*.json"))]
        return [one for one in found if one.served]

    def possible_share(self, case: Case) -> float:
        """Return the share of requests whose promise the case's levels keep on an idle machine."""
        arrivals = self.arrivals(case.alpha)
        sizes = [(one.app, self._bench.size(one.app, one.question)) for one in arrivals]
        narrowest = self._bench.times.latency.levels[-1]
        levels = {app: self.levels(case, app, arrivals) or (narrowest, narrowest) for app in SHARES}
        read = LEAST_SHARE if SYSTEMS[case.system].shortens else 1.0
        return possible_share(self._bench.times, SHARES, levels, sizes, case.kind, read)

    def arrivals(self, alpha: float) -> list[Arrival]:
        """Return the trace of a mix of apps."""
        n_questions = {app: len(each.questions) - 1 for app, each in self._bench.apps.items()}
        found = trace(alpha, self._n, self._seed, n_questions)
        return [one._replace(question=one.question + 1) for one in found]  # 0 is for the warm-up

    def levels(
        self, case: Case, app: str, arrivals: Sequence[Arrival]
    ) -> tuple[float, float] | None:
        """Return the levels that a case asks for in an app's requests; None if they are planned."""
        system = SYSTEMS[case.system]
        narrowest = self._bench.times.latency.levels[-1]
        fixed = {"planned": None, "whole": _WHOLE, "narrowest": (narrowest, narrowest)}
        if system.levels in fixed:
            return fixed[system.levels]
        sizes = [self._bench.size(app, one.question) for one in arrivals if one.app == app]
        return constant_levels(
            self._bench.times,
            SHARES[app],
            sizes,
            case.kind,
            is_one=system.levels == "one level",
            headroom=system.headroom,
        )

    # -- inside ----------------------------------------------------------------------------------

    def _measure(self, case: Case, rate: float, most_missed: int | None) -> Probe:
        system, bench = SYSTEMS[case.system], self._bench
        arrivals = self.arrivals(case.alpha)
        calls = self._calls(case, arrivals, rate)
        label = f"{case.system}, {case.kind}, alpha {case.alpha:g}, {rate:.3g}/s"
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(system, case.kind, bench.model, Path(folder)) as service,
            tqdm(total=len(calls), desc=label, unit="request", disable=None) as bar,
        ):
            warm_up(service, system, case.kind, bench)
            answers = send(service, calls, most_missed, bar.update)
            records = service.records()
        if answers is None:
            return Probe(case, rate, [], most_missed)
        served = [
            _served(call, arrival, answer, records)
            for call, arrival, answer in zip(calls, arrivals, answers, strict=True)
        ]
        return Probe(case, rate, served, most_missed)

    def _calls(self, case: Case, arrivals: Sequence[Arrival], rate: float) -> list[Call]:
        system, bench = SYSTEMS[case.system], self._bench
        levels = {app: self.levels(case, app, arrivals) for app in SHARES}
        names_promise = system.levels == "planned" or system.is_scheduled
        return [
            Call(
                one.number,
                one.app,
                bench.prompt(one.app, one.question, case.kind, f"{one.number}-{self._seed}"),
                one.n_answer,
                bench.word,
                bench.times.limits(SHARES[one.app], bench.size(one.app, one.question)),
                names_promise,
                levels[one.app],
                one.at / rate,
            )
            for one in arrivals
        ]


def _served(call: Call, arrival: Arrival, answer: Answer, records: Mapping[str, Record]) -> Served:
    """Join what the client measured with what the service recorded."""
    record = records.get(key_of(call.prompt))
    return Served(
        call.number,
        call.app,
        arrival.question,
        answer.ttft_ms,
        answer.tpot_ms,
        *answer.met(call.limits),
        levels=call.levels or _WHOLE if record is None else (record.prefill, record.decode),
        infeasible=() if record is None else record.infeasible,
        n_reused=0 if record is None else record.n_reused,
        error=answer.error,
        share=1.0 if record is None else record.share,
    )


def _read(path: Path) -> Probe:
    row = json.loads(path.read_text("utf-8"))
    served = [Served(**one) for one in row["served"]]
    return Probe(Case(*row["case"]), row["rate"], served, row["most_missed"])
