"""Attributes that are computed on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["lazy"]

_T = TypeVar("_T")


class lazy(Generic[_T]):  # noqa: N801  used like ``property``
    """A ``functools.cached_property`` without a lock.

    In Python 3.11, ``cached_property`` has one lock for all objects of a class. A child that is
    forked while another thread holds this lock waits forever. Without the lock, two threads may
    compute the attribute twice, so users must tolerate that or lock themselves.
    """

    def __init__(self, make: Callable[[Any], _T]) -> None:
        """Compute the attribute by calling ``make`` with the object."""
        self._make = make
        self._name = make.__name__
        self.__doc__ = make.__doc__

    def __get__(self, one: Any, owner: type | None = None) -> _T:
        """Compute the value and store it on the object, where it hides this descriptor."""
        made = one.__dict__[self._name] = self._make(one)
        return made
