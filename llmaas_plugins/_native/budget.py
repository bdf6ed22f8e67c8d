"""Byte budget shared by threads."""

from __future__ import annotations

from llmaas_hooks.errors import BudgetError

from ._ffi import ffi, lib
from .base import fail

__all__ = ["Budget"]


class Budget:
    """Thread-safe byte budget in the core: reserve before allocating, release after freeing."""

    __slots__ = ("_handle",)

    def __init__(self, limit: int) -> None:
        """Allow ``limit`` bytes to be reserved at a time."""
        handle = lib.llmaas_budget_new(limit)
        if handle == ffi.NULL:
            raise MemoryError
        self._handle = ffi.gc(handle, lib.llmaas_budget_free)

    def reserve(self, n: int) -> None:
        """Reserve ``n`` bytes, or raise ``BudgetError`` and change nothing."""
        if lib.llmaas_budget_reserve(self._handle, n):
            raise BudgetError(
                f"byte budget: {n} bytes requested, {max(self.limit - self.used, 0)} of"
                f" {self.limit} available; release memory or raise the limit"
            )

    def try_reserve(self, n: int) -> bool:
        """Reserve ``n`` bytes and return whether they fit."""
        return lib.llmaas_budget_reserve(self._handle, n) == 0

    def release(self, n: int) -> None:
        """Release ``n`` bytes; raise ``NativeError`` if fewer are reserved."""
        status = lib.llmaas_budget_release(self._handle, n)
        if status:
            raise fail(f"byte budget: release of {n} bytes, {self.used} are used", status)

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        return lib.llmaas_budget_used(self._handle)

    @property
    def peak(self) -> int:
        """Most bytes ever reserved at once."""
        return lib.llmaas_budget_peak(self._handle)

    @property
    def limit(self) -> int:
        """Most bytes to reserve at a time. Below ``used``, it only prevents new reservations."""
        return lib.llmaas_budget_limit(self._handle)

    @limit.setter
    def limit(self, value: int) -> None:
        lib.llmaas_budget_set_limit(self._handle, value)
