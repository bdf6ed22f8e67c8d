"""Models with levels, and their contexts: the level in use, and the level to use next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks import Levels, NativeContext, Request
from llmaas_plugins.elastic.adapter_index import AdapterTable
from llmaas_plugins.elastic.levels import level_index
from llmaas_plugins.elastic.units import Widths

__all__ = ["Course", "ElasticContext", "ElasticModel"]


@dataclass(frozen=True, slots=True)
class ElasticModel:
    """Prepared model that is loaded.

    Attributes:
        name: Name of the model's file.
        levels: Levels, widest first.
        table: Name of the table of widths.
        widths: Widths by level.
        cuts_keys_values: Whether narrow levels compute the keys and values of their groups only.
        is_compensated: Whether biases are added to products.
        adapters: Place of the table's adapters in the file, or None if it has none.
        is_adapted: Whether the adapters are added to products.
        levels_key: Hash of all by which the levels differ from the whole model.
    """

    name: str
    levels: tuple[float, ...]
    table: str
    widths: tuple[Widths, ...]
    cuts_keys_values: bool
    is_compensated: bool
    adapters: AdapterTable | None
    is_adapted: bool
    levels_key: str

    def report(self) -> dict[str, Any]:
        """Return the model's levels and the number of units in use at each."""
        return {
            "table": self.table,
            "cuts_keys_values": self.cuts_keys_values,
            "compensated": self.is_compensated,
            "key": self.levels_key,
            "adapters": self._adapters(),
            "levels": list(self.levels),
            "widths": {
                str(level): {"groups": int(one.groups.sum()), "neurons": int(one.neurons.sum())}
                for level, one in zip(self.levels, self.widths, strict=True)
            },
        }

    def _adapters(self) -> dict[str, Any] | None:
        if self.adapters is None:
            return None
        return {
            "on": self.is_adapted,
            "rank": self.adapters.rank,
            "bytes": self.adapters.n_bytes,
        }


@dataclass(slots=True)
class Course:
    """Levels of one request, or of the app's own use of a context.

    Attributes:
        prefill: Level wanted for the prompt.
        decode: Level wanted after the first sampled token.
        at_first_token: Function from the first token's logits to the level that replaces
            ``decode``.
        at_resume: Function from the number of sampled tokens to the level that replaces ``decode``
            after an interruption.
        is_decoding: Whether a token was sampled.
    """

    prefill: float = 1.0
    decode: float = 1.0
    at_first_token: Callable[[NDArray[np.float32]], float] | None = None
    at_resume: Callable[[int], float] | None = None
    is_decoding: bool = False

    @property
    def wanted(self) -> float:
        """Level for the next token."""
        return self.decode if self.is_decoding else self.prefill


@dataclass(slots=True)
class ElasticContext:
    """Context of a prepared model.

    Attributes:
        native: Native context, where the level is set.
        model: Model of the context.
        request: Request that the context serves, or None.
        rests_at: Levels asked for when the context was last used without a request; None after
            other levels were set.
        level: Level in use, one of the model's.
        course: Levels that the request wants, or the app without a request.
        evaluated: Level of the last batch, whose logits ``Llama`` may hold. None before any batch.
    """

    native: NativeContext
    model: ElasticModel
    request: Request | None = None
    rests_at: Levels | None = None
    level: float = 1.0
    course: Course = field(default_factory=Course)
    evaluated: float | None = None

    def begin(self, levels: Levels) -> bool:
        """Use the prompt's level; return whether the level changed.

        Args:
            levels: Levels of the prompt and the answer; neither may be None.
        """
        assert levels.prefill is not None
        assert levels.decode is not None
        course = Course(levels.prefill, levels.decode, levels.at_first_token, levels.at_resume)
        return self.go_on(course)

    def go_on(self, course: Course) -> bool:
        """Use the level of a request's next token; return whether the level changed."""
        self.rests_at, self.course = None, course
        return self._use(course.wanted)

    def sampled(self) -> bool:
        """Use the answer's level; return whether the level changed."""
        is_changed = self._use(self.course.decode)
        self.course.is_decoding = True
        return is_changed

    def report(self) -> dict[str, Any]:
        """Return the levels and whether the context serves a request."""
        return {
            "model": self.model.name,
            "level": self.level,
            "prefill_level": self.course.prefill,
            "decode_level": self.course.decode,
            "serves_request": self.request is not None,
        }

    def _use(self, level: float) -> bool:
        # Ctrl-C may have left the record behind the engine, so set even the level that it names.
        self.native.level = level_index(self.model.levels, level)
        # The context may be held at one level (`hold_level`), so read back the level in use.
        former, self.level = self.level, self.model.levels[self.native.level]
        return self.level != former
