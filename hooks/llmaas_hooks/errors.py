"""Exceptions of the suite.

Every message says what happened, what was found and expected, and the next step.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CodecError",
    "ConfigError",
    "IncompatibleError",
    "LimitError",
    "LlmaasError",
    "PluginError",
    "StoreError",
    "UnknownPluginError",
    "UnmetBudgetError",
]


class LlmaasError(Exception):
    """Base class of every exception that this suite raises."""


class ConfigError(LlmaasError, ValueError):
    """A configuration value or an input file is wrong."""


class UnknownPluginError(LlmaasError, LookupError):
    """The named plugin is not installed."""


class IncompatibleError(LlmaasError, RuntimeError):
    """The installed llama-cpp-python is not the one the patches were written for."""


class PluginError(LlmaasError, RuntimeError):
    """A plugin's hook failed; ``__cause__`` is the plugin's exception.

    Attributes:
        plugin: Name under which the plugin is registered.
        hook: Name of the hook that failed.
    """

    def __init__(self, plugin: str, hook: str, cause: BaseException) -> None:
        """Name the plugin and the hook in the message."""
        super().__init__(f"plugin {plugin!r} failed in {hook}: {_described(cause)}")
        self.plugin = plugin
        self.hook = hook
        self.__cause__ = cause

    def __reduce__(self) -> tuple[type[PluginError], tuple[str, str, BaseException | None]]:
        """Return how to make the error in another process."""
        return PluginError, (self.plugin, self.hook, self.__cause__)


def _described(cause: BaseException) -> str:
    kind = type(cause).__name__
    try:
        return f"{kind}: {cause}"
    except Exception:  # the exception's own __str__ raises
        return kind


class StoreError(LlmaasError, OSError):
    """A chunk store cannot be opened, read or written."""


class CodecError(LlmaasError, ValueError):
    """Encoded bytes are damaged, belong to something else, or have an unknown format."""


class BudgetError(LlmaasError, MemoryError):
    """A byte budget is too small for the request."""


class UnmetBudgetError(BudgetError):
    """The memory budget that the user set for the process cannot be met.

    It reaches the app whatever ``on_error`` says, because going on would exceed the budget.

    Attributes:
        missing: Bytes by which the budget is too small.
    """

    def __init__(self, message: str, missing: int = 0) -> None:
        """Give the message, and the bytes that another part of the process could release."""
        super().__init__(message)
        self.missing = missing


class LimitError(LlmaasError, RuntimeError):
    """A service limit (contexts, tokens, queue) was reached."""
