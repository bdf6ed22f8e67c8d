"""What the hooks pass: frozen dataclasses, and the handle a plugin gets on a running engine."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks.errors import ConfigError

__all__ = [
    "ContextCreate",
    "DecodeStep",
    "Engine",
    "FileStamp",
    "KVRestored",
    "Levels",
    "LogitsView",
    "ModelFile",
    "ModelLoad",
    "Override",
    "Plugin",
    "Request",
    "RequestStats",
    "Tokens",
]

Tokens = NDArray[np.int32]
Override = bool | int | float | str

LEAST_LEVEL = 0.2
"""The narrowest that an elastic model is (ElastiLM §3.2)."""
_ROUNDING = 1e-9


class Plugin(Protocol):
    """What an entry point of group ``llmaas_plugins`` must name: a class of this shape.

    Methods decorated with ``llmaas_hooks.hookimpl`` are its hook implementations.
    """

    Config: ClassVar[type[Any]]
    """A frozen pydantic model; unknown keys must be errors (``extra="forbid"``)."""

    def __init__(self, config: Any) -> None:
        """Take the validated configuration. Nothing else happens yet: no thread, no file."""


class Engine(Protocol):
    """One ``llama_cpp.Llama`` and its context, as the plugins see it."""

    @property
    def llama(self) -> Any:
        """The ``llama_cpp.Llama`` object."""

    @property
    def ctx(self) -> int:
        """Address of the ``llama_context``."""

    @property
    def model(self) -> int:
        """Address of the ``llama_model``."""

    @property
    def n_seq_max(self) -> int:
        """Sequences the context really has; the app reads the number it asked for."""

    @property
    def load(self) -> ModelLoad | None:
        """How the model was opened; None if that was before the activation."""

    @property
    def alteration(self) -> str | None:
        """The call by which the app changed how cells are computed; None: it did not.

        That is the name of the first such call, ``llama_set_adapters_lora`` for instance. Using a
        sequence that the app did not ask for is one, too: cells of plugins may have been there.
        """

    @property
    def n_spare(self) -> int:
        """Cells that plugins added to the context; the app reads ``n_ctx`` without them."""

    @property
    def parked(self) -> set[int]:
        """Sequences in which a plugin keeps cells between calls; it adds and removes its own.

        The app does not see them. Before an app's call that would show or move all cells, the host
        empties these sequences and this set.
        """

    @property
    def n_explained(self) -> int:
        """Leading tokens of ``resident_tokens`` that are known to be what the cells hold."""

    @property
    def resident_app(self) -> str | None:
        """App whose tokens ``resident_tokens`` are; None if it has no name.

        A request of another app goes on with none of these cells, unless a plugin says in
        ``llmaas_kv_restore`` that it does.
        """

    @property
    def n_outputs(self) -> int:
        """How many of the running request's last prompt tokens give logits and final states.

        It is 1 for each request at first. A plugin may ask for more in ``llmaas_request_begin``,
        never for fewer: the host then evaluates these tokens, even if their cells are there, and
        the number is 1 again when the request's first token is there. It stays 1 where the request
        goes on with cells that nobody can explain.
        """

    @n_outputs.setter
    def n_outputs(self, n_outputs: int) -> None: ...

    @property
    def is_evaluating(self) -> bool:
        """Whether the batch that is decoded is one of ``Llama.eval``; plugins make others."""

    def resident_tokens(self) -> Tokens:
        """Tokens of ``Llama``'s books: what sequence 0 should hold from position 0; ``(n,)``."""

    def defer(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the background thread; calls into this engine wait until it is done."""


class FileStamp(NamedTuple):
    """State of a file's content, as far as the file system tells it without reading the file.

    Attributes:
        device: Device that holds the file.
        inode: Its number there.
        n_bytes: Its size.
        mtime_ns: When its content last changed.
        ctime_ns: When its content, owner, mode or names last changed.
    """

    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self | None:
        """Return the state that ``stat`` told; None for anything but a regular file."""
        if not stat.S_ISREG(status.st_mode):
            return None
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times)


class ModelFile(NamedTuple):
    """A file that was loaded.

    Attributes:
        path: Absolute path it was opened by.
        stamp: Its state just before and just after the load; None if these differ, or if it is no
            regular file: then nobody knows what was loaded.
    """

    path: str
    stamp: FileStamp | None


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A model file about to be opened.

    Attributes:
        path: The GGUF file.
        params: The ``llama_model_params`` structure; fields may be edited. Keep callback objects
            that you store in it alive as long as the model.
        files: Every file of the model, all splits in order. Before the load, the stamps are those
            of the files that are there now.
        overrides: Metadata that the app replaces (``kv_overrides``), by key.
        adapters: LoRA files that were loaded for the model, in order.
    """

    path: str
    params: Any
    files: tuple[ModelFile, ...] = ()
    overrides: Mapping[str, Override] = field(default_factory=dict)
    adapters: list[ModelFile] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ContextCreate:
    """A context about to be created.

    Attributes:
        model: Address of the ``llama_model``.
        params: A copy of the app's ``llama_context_params``; fields may be edited, the app's own
            structure keeps its values. ``n_ctx`` may be made larger by a multiple of 256.
        load: How the model was opened; None if that was before the activation.
        checks: A plugin may add a function of the new context's address. If one returns False, or
            the context cannot be made as edited, the app gets one made with its own values.
    """

    model: int
    params: Any
    load: ModelLoad | None = None
    checks: list[Callable[[int], bool]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One finished ``llama_decode``.

    Attributes:
        ctx: Address of the ``llama_context``.
        n_tokens: Tokens in the batch.
        seconds: Wall time of the call.
    """

    ctx: int
    n_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LogitsView:
    """Logits about to be sampled.

    Attributes:
        ctx: Address of the ``llama_context``.
        index: Output row, as given to ``llama_sampler_sample``.
        logits: The engine's own buffer, shape ``(n_vocab,)`` float32. Edit in place.
    """

    ctx: int
    index: int
    logits: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One ``Llama.generate`` call.

    Attributes:
        engine: The engine that serves it.
        tokens: The whole prompt, shape ``(n,)`` int32.
        context_id: Name of the persistent context it belongs to; None for a stateless request.
        app: Name of the app that asks; None if that is not known.
        declined: Plugins that the app asks to do without, for this request.
        reads_tokens: The app gave a logits processor or a stopping criterion, which reads the
            tokens so far.
    """

    engine: Engine
    tokens: Tokens
    context_id: str | None
    app: str | None = None
    declined: frozenset[str] = frozenset()
    reads_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Levels:
    """How much of an elastic model a request computes with, as shares of its blocks' weights.

    Attributes:
        prefill: Of the prompt: 0.2 to 1.0; None leaves that to who is asked next.
        decode: From the first sampled token on; likewise.
    """

    prefill: float | None = None
    decode: float | None = None

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            ConfigError: One of them is no level.
        """
        for name, level in (("prefill", self.prefill), ("decode", self.decode)):
            if level is not None and not _is_level(level):
                is_one = repr(self.prefill) == repr(self.decode)  # also where it is nan
                which = "the level" if is_one else f"the level of {name}"
                raise ConfigError(
                    f"{which} must be a number from {LEAST_LEVEL} to 1.0, found {level!r}"
                )

    def over(self, other: Levels | None) -> Levels:
        """These, and those of ``other`` where these say nothing."""
        if other is None:
            return self
        return Levels(
            other.prefill if self.prefill is None else self.prefill,
            other.decode if self.decode is None else self.decode,
        )


def _is_level(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and LEAST_LEVEL - _ROUNDING <= float(value) <= 1


@dataclass(frozen=True, slots=True)
class RequestStats:
    """How a request went.

    Attributes:
        n_prompt: Prompt tokens.
        n_reused: Prompt tokens that were in the engine's cells before it started to evaluate.
        n_generated: Tokens generated.
        prepare_s: Seconds from the call until evaluation could start (the switch latency).
        first_token_s: Seconds from the call to the first token; None when there was none.
        total_s: Seconds from the call until its generator ended.
    """

    n_prompt: int
    n_reused: int
    n_generated: int
    prepare_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class KVRestored:
    """Result of ``llmaas_kv_restore``.

    Attributes:
        n_tokens: Sequence 0 now holds exactly the first ``n_tokens`` prompt tokens' cells.
        n_loaded: Those of them that came from the store; the others were resident, or computed.
    """

    n_tokens: int
    n_loaded: int
