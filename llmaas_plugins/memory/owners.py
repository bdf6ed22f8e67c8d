"""Who has which memory of the process, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from llmaas_hooks import MemoryClaim
from llmaas_plugins import process_memory
from llmaas_plugins.machine import mapped_bytes, resident_bytes
from llmaas_plugins.memory.division import Values, values

__all__ = ["owner_lines", "owners"]

_MIB = 1 << 20


def owners(claims: Iterable[MemoryClaim]) -> dict[str, Any]:
    """Return the process's memory by owner, as JSON types.

    ``owners`` are sorted by ``bytes``, which take memory now; together they are about
    ``resident_bytes``. Memory that no claim tells is called after what it holds. It would be
    negative, and is 0, if claims tell more than there is.

    Args:
        claims: Claims of all plugins, and of the engines.
    """
    found = [_of_claim(claim) for claim in claims if claim.most]
    resident, mapped = resident_bytes(), mapped_bytes()
    rest = resident - mapped - sum(one["bytes"] for one in found)
    found += [
        _rest(
            "mapped files",
            mapped,
            "code, and model files that are mapped: the system keeps them while there is room",
        ),
        _rest(
            "the rest",
            rest,
            "the app, Python, the engine's buffers, repacked weights, and cells of calls that are "
            "decoded together",
        ),
    ]
    return {
        "resident_bytes": resident,
        "budget": process_memory.budget(),
        "owners": sorted(found, key=lambda one: -one["bytes"]),
    }


def owner_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield a report of ``owners`` as lines of text."""
    rows = [("owner", "MiB", "may use", "most", "kind", "why")]
    for one in report["owners"]:
        sizes = (one["bytes"], one["may_use_bytes"], one["most_bytes"])
        rows.append((one["owner"], *map(_mib, sizes), one["kind"], one["why"]))
    budget = report["budget"]
    limit = "no budget" if budget is None else f"a budget of {_mib(budget)} MiB"
    rows.append(("together", _mib(report["resident_bytes"]), "", "", "", limit))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for owner, *numbers, kind, why in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:4], strict=True)]
        yield "  ".join([owner.ljust(widths[0]), *cells, kind.ljust(widths[4]), why]).rstrip()


def _of_claim(claim: MemoryClaim) -> dict[str, Any]:
    is_movable = claim.resize is not None
    worth = values(claim) if is_movable and claim.is_known else None
    return {
        "owner": claim.owner,
        "bytes": claim.held if claim.taken is None else claim.taken,
        "may_use_bytes": claim.held,
        "most_bytes": claim.most,
        "kind": "movable" if is_movable else "reserved",
        "why": _worth(claim.why, worth) if is_movable else claim.why or "needed",
        "saved_s_by_last_mib": None if worth is None else worth.last,
        "saved_s_by_next_mib": None if worth is None else worth.next,
    }


def _worth(reason: str, worth: Values | None) -> str:
    """Return what memory that can move saves, as a text."""
    why = f"{reason}; " if reason else ""
    if worth is None:
        return f"{why}nothing is known yet of the time that this saves"
    last, more = (1000 * seconds for seconds in worth)
    return f"{why}the last MiB saves {last:.3g} ms a second, one more would save {more:.3g}"


def _rest(owner: str, n_bytes: int, why: str) -> dict[str, Any]:
    n_bytes = max(0, n_bytes)
    return {
        "owner": owner,
        "bytes": n_bytes,
        "may_use_bytes": None,
        "most_bytes": None,
        "kind": "rest",
        "why": why,
        "saved_s_by_last_mib": None,
        "saved_s_by_next_mib": None,
    }


def _mib(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / _MIB:.1f}"
