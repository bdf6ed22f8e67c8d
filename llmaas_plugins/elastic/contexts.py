"""Models with levels, and their contexts: which level is in use, and which comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmaas_hooks import Levels, NativeContext, Request
from llmaas_plugins.elastic.levels import level_index
from llmaas_plugins.elastic.units import Widths

__all__ = ["ElasticContext", "ElasticModel"]


@dataclass(frozen=True, slots=True)
class ElasticModel:
    """A model that was prepared, as it is used here.

    Attributes:
        name: Of its file.
        levels: Widest first.
        table: The name of its widths.
        widths: By level.
        is_compensated: Whether products get biases.
    """

    name: str
    levels: tuple[float, ...]
    table: str
    widths: tuple[Widths, ...]
    is_compensated: bool

    def report(self) -> dict[str, Any]:
        """What it is, with the units in use in all layers."""
        return {
            "table": self.table,
            "compensated": self.is_compensated,
            "levels": list(self.levels),
            "widths": {
                str(level): {"groups": int(one.groups.sum()), "neurons": int(one.neurons.sum())}
                for level, one in zip(self.levels, self.widths, strict=True)
            },
        }


@dataclass(slots=True)
class ElasticContext:
    """A context of such a model.

    Attributes:
        native: Where its level is set.
        model: Its model.
        request: The one that it serves.
        level: In use; one of the model's.
        prefill: That is asked for, of a prompt.
        decode: Of what follows the first sampled token.
        is_decoding: Whether one was sampled.
        evaluated: Of the last batch, whose logits ``Llama`` may have; None: there was none.
    """

    native: NativeContext
    model: ElasticModel
    request: Request | None = None
    level: float = 1.0
    prefill: float = 1.0
    decode: float = 1.0
    is_decoding: bool = False
    evaluated: float | None = None

    def begin(self, levels: Levels) -> bool:
        """A prompt comes next; whether the level changed.

        Args:
            levels: Both.
        """
        assert levels.prefill is not None
        assert levels.decode is not None
        self.prefill, self.decode = levels.prefill, levels.decode
        self.is_decoding = False
        return self._use(self.prefill)

    def sampled(self) -> bool:
        """The answer comes next; whether the level changed."""
        self.is_decoding = True
        return self._use(self.decode)

    def report(self) -> dict[str, Any]:
        """What it is doing."""
        return {
            "model": self.model.name,
            "level": self.level,
            "prefill_level": self.prefill,
            "decode_level": self.decode,
            "serves_request": self.request is not None,
        }

    def _use(self, level: float) -> bool:
        index = level_index(self.model.levels, level)
        if self.level == self.model.levels[index]:
            return False
        self.native.level = index
        former, self.level = self.level, self.model.levels[self.native.level]  # it may be held
        return self.level != former
