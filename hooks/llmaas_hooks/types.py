"""Types that the hooks pass: frozen dataclasses, and a plugin's handle on a running engine."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from llmaas_hooks.levels import NO_LEVELS, Levels
from llmaas_hooks.parked import ParkedSequences
from llmaas_hooks.promises import NO_PROMISE, Promise

__all__ = [
    "ContextCreate",
    "DecodeStep",
    "Engine",
    "FileStamp",
    "KVRestored",
    "LogitsView",
    "ModelFile",
    "ModelLoad",
    "Override",
    "Plugin",
    "Request",
    "Tokens",
]

Tokens = NDArray[np.int32]
Override = bool | int | float | str


class Plugin(Protocol):
    """Shape of the class that an entry point of group ``llmaas_plugins`` must name.

    Methods decorated with ``llmaas_hooks.hookimpl`` are the plugin's hook implementations.
    """

    Config: ClassVar[type[Any]]
    """Frozen pydantic model; it must refuse unknown keys (``extra="forbid"``)."""

    def __init__(self, config: Any) -> None:
        """Store the validated configuration; start no thread and open no file yet."""


class Engine(Protocol):
    """One ``llama_cpp.Llama`` and its context; valid as long as the app keeps its ``Llama``."""

    @property
    def llama(self) -> Any:
        """The ``llama_cpp.Llama`` object; ``ReferenceError`` once the app has dropped it."""

    @property
    def ctx(self) -> int:
        """Address of the ``llama_context``."""

    @property
    def model(self) -> int:
        """Address of the ``llama_model``."""

    @property
    def n_seq_max(self) -> int:
        """Number of sequences that the context really has.

        Plugins may add sequences; the app still reads the number that it asked for.
        """

    @property
    def load(self) -> ModelLoad | None:
        """Record of how the model was opened; None if that was before the activation."""

    @property
    def alteration(self) -> str | None:
        """Name of the app's first call that changed how cells are computed, or None.

        An example is ``llama_set_adapters_lora``. Use of a sequence that the app did not ask for
        counts as such a call: a plugin's cells may have been there.
        """

    @property
    def n_spare(self) -> int:
        """Number of cells that plugins added to the context.

        The app reads an ``n_ctx`` that does not count them.
        """

    @property
    def parked(self) -> ParkedSequences:
        """Sequences in which plugins keep cells between calls.

        A plugin adds and removes its own sequences; the app does not see them. Before an app's call
        that would show or move all cells, the host empties these sequences and this set. One of
        them may be a label on cells of sequence 0 (``ParkedSequences.current``).
        """

    @property
    def n_explained(self) -> int:
        """Number of leading tokens of ``resident_tokens`` that the cells are known to hold."""

    @property
    def resident_app(self) -> str | None:
        """App whose tokens ``resident_tokens`` are; None if that app has no name.

        A request of another app starts without these cells, unless a plugin returns from
        ``llmaas_kv_restore`` that they hold the request's tokens.
        """

    @property
    def n_outputs(self) -> int:
        """Number of last prompt tokens for which this request computes logits and final states.

        The number is 1 at the start of each request. A plugin may raise it in
        ``llmaas_request_begin``, never lower it. Tokens whose cells are there are not evaluated
        again, so they give neither. The number is 1 again once the request's first token is there.
        It stays 1 if the request continues from cells whose tokens are unknown.
        """

    @n_outputs.setter
    def n_outputs(self, n_outputs: int) -> None: ...

    @property
    def keeps_cells(self) -> bool:
        """Whether a plugin saves and restores the cells of the request in progress.

        The host sets False before each request. A plugin that keeps the cells sets True in
        ``llmaas_kv_restore``; only then may others interrupt the request (``llmaas_turn``).
        """

    @keeps_cells.setter
    def keeps_cells(self, keeps_cells: bool) -> None: ...

    @property
    def can_drop_tokens(self) -> bool:
        """Whether the last few tokens can be removed; recurrent models, for instance, cannot."""

    @property
    def is_evaluating(self) -> bool:
        """Whether ``Llama.eval`` decodes the current batch; plugins decode batches of their own."""

    def resident_tokens(self) -> Tokens:
        """Return the tokens that ``Llama`` records for sequence 0, from position 0; shape ``(n,)``.

        The cells may differ where an app changed them without ``Llama``: see ``n_explained``.
        """

    def require_evaluation(self) -> None:
        """Make ``Llama`` evaluate a prompt's last token again, even if it holds its logits.

        A plugin that changes how tokens are computed needs this.
        """

    def defer(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the background thread; calls into this engine wait until it is done."""


class FileStamp(NamedTuple):
    """State of a file's content, as the file system reports it without reading the file.

    Attributes:
        device: Device that holds the file.
        inode: Inode number on that device.
        n_bytes: Size of the file.
        mtime_ns: Time of the last change of the content, in nanoseconds.
        ctime_ns: Time of the last change of the content, owner, mode or names, in nanoseconds.
    """

    device: int
    inode: int
    n_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Self | None:
        """Return the state of the file at ``path``; None if no regular file is there."""
        try:
            return cls.of(os.stat(path))  # noqa: PTH116  faster than Path.stat, once a request
        except (OSError, ValueError):  # ValueError: the path has a zero byte
            return None

    @classmethod
    def of(cls, status: os.stat_result) -> Self | None:
        """Return the state that a ``stat`` call reported; None for anything but a regular file."""
        if not stat.S_ISREG(status.st_mode):
            return None
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times)


class ModelFile(NamedTuple):
    """A file from which a model was loaded.

    Attributes:
        path: Absolute path by which the file was opened.
        stamp: State of the file just before and just after the load. None if the two differ or the
            file is no regular file: then the loaded content is unknown.
    """

    path: str
    stamp: FileStamp | None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ModelLoad:
    """A model file about to be opened.

    The record of a loaded model lives as long as the model, so a plugin can keep what it knows of a
    model in a ``WeakKeyDictionary`` of these records.

    Attributes:
        path: Path of the GGUF file.
        params: ``llama_model_params`` structure; its fields may be edited. The plugin must keep
            callback objects that it stores here alive as long as the model.
        files: Every file of the model, all splits in order. Before the load, the stamps are those
            of the files that are there now.
        overrides: Metadata that the app replaces (``kv_overrides``), by key.
        adapters: LoRA files that were loaded for the model, in order.
        is_claimed: Whether the model was loaded with the weights that plugins claimed.
        in_place_of: Path that the app named, if a plugin named another file to load.
    """

    path: str
    params: Any
    files: tuple[ModelFile, ...] = ()
    overrides: Mapping[str, Override] = field(default_factory=dict)
    adapters: list[ModelFile] = field(default_factory=list)
    is_claimed: bool = False
    in_place_of: str | None = None


@dataclass(slots=True)
class ContextCreate:
    """A context about to be created.

    Attributes:
        model: Address of the ``llama_model``.
        params: Copy of the app's ``llama_context_params``; its fields may be edited, and the app's
            own structure keeps its values. ``n_ctx`` may be raised by a multiple of 256.
        load: Record of how the model was opened; None if that was before the activation.
        checks: Functions of the new context's address; a plugin may append one. If one returns
            False, or the context cannot be created as edited, the app gets a context with its own
            values.
        wants_seats: Requests that are to lie aside (``llmaas_turn``); a plugin may set it.
        n_seats: As many as the plugin that keeps the cells has added the last cells and sequences
            for: all of them, or none.
        why_no_seats: Why none can lie aside; None if nothing is known against it.
        is_own: Whether a plugin makes the context for itself (``own_models.own_contexts``). It
            serves no requests.
        takes_turns: Whether requests on the context may be interrupted (``llmaas_turn``).
    """

    model: int
    params: Any
    load: ModelLoad | None = None
    checks: list[Callable[[int], bool]] = field(default_factory=list)
    wants_seats: int = 0
    n_seats: int = 0
    why_no_seats: str | None = None
    is_own: bool = False
    takes_turns: bool = False


class DecodeStep(NamedTuple):
    """One finished ``llama_decode``.

    Attributes:
        ctx: Address of the ``llama_context``.
        n_tokens: Number of tokens in the batch.
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
        logits: The engine's own buffer, shape ``(n_vocab,)`` float32; to be edited in place, and
            not to be kept after the call.
    """

    ctx: int
    index: int
    logits: NDArray[np.float32]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Request:
    """One ``Llama.generate`` call.

    Attributes:
        engine: Engine that serves the request.
        tokens: The whole prompt, shape ``(n,)`` int32.
        context_id: Name of the request's persistent context; None for a stateless request.
        app: Name of the app that made the request; None if unknown.
        declined: Names of plugins that the app switched off for this request. A plugin that changes
            generated text must check this itself and leave such a request alone.
        levels: Levels that the app asks for; a plugin that serves levels must check this itself.
        promise: Latency that the app asks for.
        notes: Place where a plugin may write a report about the request, as JSON types under its
            own name, for the one who made it; None if nobody reads it.
        reads_tokens: Whether the app gave a logits processor or a stopping criterion. Both read the
            tokens so far, so a plugin must not evaluate tokens that were not generated.
        whole: The request with its whole prompt, if this one reads a part of it.
    """

    engine: Engine
    tokens: Tokens
    context_id: str | None
    app: str | None = None
    declined: frozenset[str] = frozenset()
    levels: Levels = NO_LEVELS
    promise: Promise = NO_PROMISE
    notes: dict[str, Any] | None = None
    reads_tokens: bool = False
    whole: Request | None = None


@dataclass(frozen=True, slots=True)
class KVRestored:
    """Result of ``llmaas_kv_restore``.

    Attributes:
        n_tokens: Number of leading prompt tokens whose cells sequence 0 now holds, and no others.
        n_loaded: Number of these cells that came from the store; the others were resident or
            computed.
    """

    n_tokens: int
    n_loaded: int
