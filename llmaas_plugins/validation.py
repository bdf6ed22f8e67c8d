"""Validation by pydantic models that a fork on another thread cannot break."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from llmaas_hooks import forks

__all__ = ["validate", "validate_json"]

_Model = TypeVar("_Model", bound=BaseModel)


def validate(model: type[_Model], values: Mapping[str, Any]) -> _Model:
    """Return ``values`` as a ``model``; forks on other threads wait meanwhile.

    A model's first validation takes a lock of pydantic. If another thread forks at that moment,
    nothing releases the lock in the child, whose own validation would wait forever.

    Raises:
        ValidationError: The values are not valid.
    """
    with forks.postponed():
        return model.model_validate(values)


def validate_json(model: type[_Model], text: str | bytes) -> _Model:
    """Return a JSON text as a ``model``, as ``validate`` does.

    Raises:
        ValidationError: The text is no JSON, or its values are not valid.
    """
    with forks.postponed():
        return model.model_validate_json(text)
