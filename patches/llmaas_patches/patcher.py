"""Apply and revert patches; thread-safe, with a check of the targets' parameters."""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from llmaas_hooks import IncompatibleError, forks
from llmaas_patches.compat import is_since

if TYPE_CHECKING:
    from llmaas_patches.host import Host

__all__ = ["Applied", "Patch", "check", "resolve"]

_lock = forks.lock()
_log = logging.getLogger("llmaas.patches")


@dataclass(frozen=True, slots=True)
class Patch:
    """Description of one patch.

    Attributes:
        target: ``module:name`` or ``module:Class.name``.
        parameters: Names of the leading parameters that the wrapper relies on.
        wrap: Function that makes the replacement from the host and the original.
        also: Other names of the same object (``llama_cpp`` star-imports its C bindings).
        since: First release of llama-cpp-python that has the target; older ones skip the patch.
    """

    target: str
    parameters: tuple[str, ...]
    wrap: Callable[[Host, Callable[..., Any]], Callable[..., Any]]
    also: tuple[str, ...] = ()
    since: str = "0"

    @property
    def applies(self) -> bool:
        """Whether the installed release must have the target."""
        return is_since(self.since)


def resolve(target: str) -> tuple[Any, str]:
    """Return the owner object and the attribute name of ``module:dotted.name``."""
    module, _, dotted = target.partition(":")
    owner: Any = importlib.import_module(module)
    *path, name = dotted.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


class Applied:
    """Applied patches. ``revert`` restores every original, the last one first."""

    def __init__(self) -> None:
        """Start without patches."""
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def apply(self, patches: Sequence[Patch], host: Host) -> None:
        """Check every patch against the installed release, then apply all of them or none.

        Modules that already imported a function by name also get the replacement.

        Raises:
            IncompatibleError: A target is missing or has other parameters.
        """
        try:
            with _lock:
                self._apply([(patch, _check(patch)) for patch in patches if patch.applies], host)
        except BaseException:
            self.revert()
            raise

    def _apply(self, found: Sequence[tuple[Patch, Any]], host: Host) -> None:
        replacements: dict[int, tuple[Any, Any]] = {}
        for patch, original in found:
            replacement = patch.wrap(host, original)
            replacements[id(original)] = original, replacement
            for target in (patch.target, *patch.also):
                self._replace(*resolve(target), original, replacement)
        for copy in list(_copies(replacements)):
            self._replace(*copy)

    def _replace(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        """Remember how to restore ``owner.name``, then set it: Ctrl-C may come in between."""
        self._undo.append((owner, name, original, replacement))
        setattr(owner, name, replacement)

    def targets(self) -> list[str]:
        """Return the dotted names of all patched functions."""
        return [f"{owner.__name__}.{name}" for owner, name, _, _ in self._undo]

    def revert(self) -> None:
        """Restore each original; idempotent.

        A name that other code patched afterwards keeps that code's wrapper. It still reaches the
        original through our wrapper, which has no listeners any more.
        """
        with _lock:
            while self._undo:
                owner, name, original, replacement = self._undo[-1]
                found = inspect.getattr_static(owner, name, None)
                if found is replacement:
                    setattr(owner, name, original)
                elif found is not original:
                    _log.warning(
                        "%s.%s was patched again by other code and is not restored",
                        owner.__name__,
                        name,
                    )
                self._undo.pop()  # last: Ctrl-C may come before


def check(patches: Sequence[Patch]) -> list[tuple[str, str | None]]:
    """Check every patch without applying it; return each target with its problem or None."""
    report: list[tuple[str, str | None]] = []
    for patch in filter(operator.attrgetter("applies"), patches):
        try:
            _check(patch)
            report.append((patch.target, None))
        except IncompatibleError as error:
            report.append((patch.target, str(error)))
    return report


def _check(patch: Patch) -> Any:
    """Check a patch's target, its parameters and its other names; return the original."""
    try:
        owner, name = resolve(patch.target)
        original = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        raise _drift(patch.target, "is missing") from error
    try:
        found = tuple(inspect.signature(original).parameters)[: len(patch.parameters)]
    except (TypeError, ValueError) as error:
        raise _drift(patch.target, "has no signature to check") from error
    if found != patch.parameters:
        raise _drift(patch.target, f"has parameters {found}, expected {patch.parameters}")
    for target in patch.also:
        owner, name = resolve(target)
        if inspect.getattr_static(owner, name, None) is not original:
            raise _drift(target, f"is not the same object as {patch.target}")
    return original


def _copies(
    replacements: Mapping[int, tuple[Any, Any]],
) -> Iterator[tuple[ModuleType, str, Any, Any]]:
    """Yield other modules' names for the originals, which an app may have imported by name."""
    wanted = frozenset(replacements)
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        if wanted.isdisjoint(map(id, list(vars(module).values()))):  # nearly always, and quick
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                yield (module, name, *replacements[id(value)])


def _drift(target: str, what: str) -> IncompatibleError:
    import llama_cpp

    return IncompatibleError(
        f"{target} {what} in llama-cpp-python {llama_cpp.__version__}. "
        "Install a version that `llmaas doctor` names as tested."
    )
