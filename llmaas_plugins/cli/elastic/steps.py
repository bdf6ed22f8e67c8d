"""Steps of a command that takes long, with an estimate of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from llmaas_plugins.cli.output import duration_text, progress_bar

__all__ = ["Step", "Steps"]


class Step(NamedTuple):
    """A step of a command.

    Attributes:
        what: Name of the step, which says what it does.
        seconds: Estimated time; None if there is no estimate.
        is_done: Whether an earlier run of the command did the step.
    """

    what: str
    seconds: float | None
    is_done: bool = False


class Steps:
    """Steps of a command, which says when each begins."""

    def __init__(self, steps: Sequence[Step], say: Callable[[str], None]) -> None:
        """Take the steps in order, and a function that prints a line."""
        self._steps, self._say = steps, say

    def lines(self) -> Iterator[str]:
        """Yield a line about each step, and one about where an earlier run is continued."""
        n_done = sum(step.is_done for step in self._steps)
        for step in self._steps:
            time = "no estimate" if step.seconds is None else f"about {duration_text(step.seconds)}"
            yield f"{self._title(step)}, {'done' if step.is_done else time}"
        if 0 < n_done < len(self._steps):
            first = next(step for step in self._steps if not step.is_done)
            yield f"continuing at step {self._steps.index(first) + 1} of {len(self._steps)}"

    @property
    def seconds(self) -> float:
        """Estimated time of all steps that are not done."""
        return sum(step.seconds or 0 for step in self._steps if not step.is_done)

    def bar(self, what: str, unit: str, total: int) -> Any:
        """Return the progress bar of a step to ``update``, as a context manager."""
        step = next(step for step in self._steps if step.what == what)
        if not step.is_done:
            self._say(self._title(step))
        return progress_bar(self._title(step), unit, total)

    def _title(self, step: Step) -> str:
        return f"step {self._steps.index(step) + 1} of {len(self._steps)}: {step.what}"
