"""Changes between two builds, and problems of the engine on the newer build."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["changes", "problems"]

Facts = Mapping[str, Any]


def changes(installed: Facts, newest: Facts) -> Iterator[str]:
    """Yield one line for each difference."""
    for what in ("versions", "slots"):
        old, new = installed[what], newest.get(what, {})
        for name in old:
            if old[name] != new.get(name):
                yield f"{what}: {name} {old[name]} -> {new.get(name)}"
    for what in ("operations", "types"):
        yield from _numbering(what, installed[what], newest.get(what, []))


def _numbering(what: str, old: list[str], new: list[str]) -> Iterator[str]:
    moved = [name for name in old if name in new and old.index(name) != new.index(name)]
    for kind, names in (
        ("new", _without(new, old)),
        ("gone", _without(old, new)),
        ("with another number", moved),
    ):
        if names:
            yield f"{what}: {len(names)} {kind}: {', '.join(names)}"


def _without(names: Iterable[str], others: list[str]) -> list[str]:
    return [name for name in names if name not in others]


def problems(newest: Facts, bindings: Iterable[str]) -> Iterator[str]:
    """Yield the reasons why the suite would not work on a build; none if it would.

    Args:
        newest: Facts from the probe. A fact is missing if the process died before it.
        bindings: Functions of libllama that the suite patches and the build lacks.
    """
    for name in (*newest.get("missing", ()), *bindings):
        yield f"{name} is missing"
    if newest.get("missing"):
        return
    if "refusal" not in newest:
        yield f"the process died before the engine could be asked (after {list(newest)})"
    elif newest["refusal"] is not None:
        yield f"the engine is refused: {newest['refusal']}"
    elif "left registered" not in newest:
        yield f"the process died while it ran a model: {newest.get('said', '')}"
    elif newest["hooked"] != newest["vanilla"]:
        yield "a model's logits differ with and without the engine"
    elif not newest["products"]:
        yield "the engine computed no matrix product"
    elif newest["left registered"]:
        yield "the engine stays registered after llmaas_unregister"
