"""Differences from vanilla, as a list and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from llmaas_eval.markdown import table
from llmaas_eval.peer_tests.runs import MODES, PLUGIN, VANILLA, Outcome, Run

__all__ = ["as_table", "problems", "restored_tokens"]

_DIED = ("crashed", "not imported")


def problems(runs: Mapping[str, Run]) -> list[str]:
    """Return the reasons why the runs do not show equal results; empty if they do."""
    vanilla = runs[VANILLA].tests
    found = []
    if not any(outcome.results for outcome in vanilla.values()):
        found.append("no test asked the engine for anything")
    for mode, run in runs.items():
        found += [f"{mode}: {problem}" for problem in _died(run) or _off(run, MODES[mode])]
        for test in {**vanilla, **run.tests}:
            difference = _difference(vanilla.get(test), run.tests.get(test))
            found += [f"{mode}: {test}: {difference}"] if difference else []
    return found


def as_table(runs: Mapping[str, Run]) -> str:
    """Return a Markdown table with a row for each test and a column for each mode."""
    vanilla = runs[VANILLA].tests
    rows = []
    for test, outcome in vanilla.items():
        others = (_difference(outcome, runs[mode].tests.get(test)) for mode in list(runs)[1:])
        cells = ("**differs**" if difference else "same" for difference in others)
        rows.append([test.rpartition("::")[2], _shown(outcome), *cells])
    rows.append(["*tokens restored*", *(str(restored_tokens(run)) for run in runs.values())])
    rows.append(["*seconds*", *(f"{run.seconds:.1f}" for run in runs.values())])
    return f"{table(['test', *runs], rows)}\n"


def _shown(outcome: Outcome) -> str:
    if outcome.outcome == "passed":
        return f"passed, {len(outcome.results)} results"
    return f"{outcome.outcome}: {outcome.message}".partition("\n")[0].replace("|", "\\|")


def restored_tokens(run: Run) -> int:
    """Return how many tokens ``kv_chunks`` restored instead of evaluating them."""
    plugins = {} if run.status is None else run.status["plugins"]
    return int(plugins.get(PLUGIN, {}).get("restored_tokens", 0))


def _died(run: Run) -> list[str]:
    """Return the tests that did not finish; tests after them were not run."""
    return [
        f"{test}: {o.outcome} {o.message}" for test, o in run.tests.items() if o.outcome in _DIED
    ]


def _off(run: Run, plugins: str | None) -> list[str]:
    """Return the ways in which a run was not in its mode."""
    is_on = run.status is not None
    if is_on != (plugins is not None):
        return [f"the suite was {'on' if is_on else 'off'}"]
    if plugins and not restored_tokens(run):
        return [f"{PLUGIN} restored nothing, so equal results say nothing about it"]
    return []


def _difference(expected: Outcome | None, found: Outcome | None) -> str | None:
    if expected is None or found is None:
        return "not run" if found is None else "run in this mode only"
    pairs = [
        ("outcome", expected.outcome, found.outcome),
        ("message", expected.message, found.message),
        *(
            (f"result {i}", a, b)
            for i, (a, b) in enumerate(zip_longest(expected.results, found.results), start=1)
        ),
    ]
    return next((f"{what} {b!r}, expected {a!r}" for what, a, b in pairs if a != b), None)
