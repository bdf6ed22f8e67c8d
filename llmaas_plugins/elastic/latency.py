"""Latency of each level on this machine: time to the first token, and time per token after it.

``profiling`` measures the times once and saves them in a file. A scheduler that chooses a level for
a deadline reads them (ElastiLM §3.1). Times between measured lengths are interpolated linearly. To
estimate the interpolation error, some lengths are first held out; ``at`` then uses those, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import llama_cpp
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.elastic.levels import level_index
from llmaas_plugins.elastic.metadata import read_elastic
from llmaas_plugins.files.file_bytes import OPEN_FLAGS, as_store_error, sync_directory, write
from llmaas_plugins.files.partial_file import taken
from llmaas_plugins.machine import processor_name
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.validation import validate, validate_json

__all__ = ["DIRECTORY", "Curves", "Errors", "Latency", "Machine", "check_writable", "latency_path"]

DIRECTORY = Path("~/.cache/llmaas/latency")

_Time = Annotated[float, Field(ge=0, le=1e15)]
_Count = Annotated[int, Field(gt=0, lt=1 << 31)]
_Times = tuple[tuple[tuple[_Time, ...], ...], ...]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Machine(_Model):
    """Machine and software that the times belong to.

    Attributes:
        cpu: Name of its processors.
        n_cpus: Number of processors.
        llama_cpp: Version of llama-cpp-python.
    """

    cpu: str
    n_cpus: int
    llama_cpp: str

    @classmethod
    def this(cls) -> Self:
        """Describe the machine that this process runs on."""
        return cls(
            cpu=processor_name(), n_cpus=os.cpu_count() or 1, llama_cpp=llama_cpp.__version__
        )


class Curves(_Model):
    """Times by number of tokens.

    Attributes:
        n_tokens: Two or more numbers of tokens, ascending.
        ms: Median times in ms; ``(n_threads, n_levels, n)``.
        spread_ms: Longest minus shortest time in ms; ``(n_threads, n_levels, n)``.
        held: Numbers of tokens between those of ``n_tokens``, held out to estimate the
            interpolation error.
        held_ms: Median times at ``held``, in ms; ``(n_threads, n_levels, n_held)``.
    """

    n_tokens: Annotated[tuple[_Count, ...], Field(min_length=2)]
    ms: _Times
    spread_ms: _Times
    held: Annotated[tuple[_Count, ...], Field(min_length=1)]
    held_ms: _Times

    def at(self, thread: int, level: int, n_tokens: int) -> float:
        """Interpolate the time for ``n_tokens`` tokens, in ms.

        Beyond the longest length, return no less than its time. Below the shortest length, return
        no less than its time scaled by the number of tokens.
        """
        measured = dict(zip(self.n_tokens, self.ms[thread][level], strict=True))
        measured |= zip(self.held, self.held_ms[thread][level], strict=True)
        return _between(measured, n_tokens)

    def errors(self) -> Errors:
        """Return the error of interpolation at ``held`` without the times measured there."""
        errors = [
            abs(_between(dict(zip(self.n_tokens, times, strict=True)), n) - ms) / max(ms, 1e-9)
            for by_level in zip(self.ms, self.held_ms, strict=True)
            for times, held in zip(*by_level, strict=True)
            for n, ms in zip(self.held, held, strict=True)
        ]
        return Errors(median=statistics.median(errors), largest=max(errors))

    def check(self, n_threads: int, n_levels: int) -> None:
        """Refuse tables with missing times.

        Raises:
            ValueError: A time is missing, or the numbers of tokens do not ascend.
        """
        shape = n_threads, n_levels, len(self.n_tokens)
        held = n_threads, n_levels, len(self.held)
        if [*map(_shape, (self.ms, self.spread_ms, self.held_ms))] != [shape, shape, held]:
            raise ValueError("the table needs one time for each level and number of tokens")
        if any(np.diff(self.n_tokens) <= 0):
            raise ValueError("the numbers of tokens do not ascend")


class Errors(_Model):
    """Differences of interpolated from measured times, as shares of the measured times.

    Attributes:
        median: Median over all numbers of tokens, levels and threads.
        largest: Largest over all numbers of tokens, levels and threads.
    """

    median: float
    largest: float


class Latency(_Model):
    """Times of a model on a machine.

    Attributes:
        model: Name of the model's file.
        table: Name of the table of widths.
        machine: The machine.
        levels: Levels, widest first.
        threads: Numbers of threads; both prompts and single tokens use the same number.
        ttft: Time from the call to the first token, by length of the prompt.
        tpot: Time per token after the first, by length of the context.
    """

    model: str
    table: str
    machine: Machine
    levels: Annotated[tuple[float, ...], Field(min_length=1)]
    threads: Annotated[tuple[_Count, ...], Field(min_length=1)]
    ttft: Curves
    tpot: Curves

    @model_validator(mode="after")
    def _has_all_times(self) -> Self:
        for curves in (self.ttft, self.tpot):
            curves.check(len(self.threads), len(self.levels))
        return self

    def ttft_ms(self, level: float, n_tokens: int, n_threads: int) -> float:
        """Return the time from a call to its first token, in ms.

        Args:
            level: Level of the prompt; between two of ``levels``, the narrower one is used.
            n_tokens: Number of tokens of the prompt that have to be evaluated.
            n_threads: Number of threads, one of ``threads``.

        Raises:
            ConfigError: That number of threads was not measured.
        """
        return self.ttft.at(self._thread(n_threads), level_index(self.levels, level), n_tokens)

    def tpot_ms(self, level: float, n_tokens: int, n_threads: int) -> float:
        """Return the time of a token that follows ``n_tokens`` others, in ms.

        The arguments are those of ``ttft_ms``.

        Raises:
            ConfigError: That number of threads was not measured.
        """
        return self.tpot.at(self._thread(n_threads), level_index(self.levels, level), n_tokens)

    def save(self, path: Path) -> None:
        """Write the times to a file, replacing an existing one.

        Raises:
            StoreError: The file cannot be written.
        """
        times = self.model_dump(mode="json")
        errors = {"ttft": self.ttft.errors(), "tpot": self.tpot.errors()}
        file = _File(
            format="llmaas-latency", version=1, sha256=_digest(times), times=times, errors=errors
        )
        partial = path.with_suffix(".partial")
        with _written(path), taken(partial) as fd:
            os.ftruncate(fd, 0)
            write(fd, file.model_dump_json().encode(), 0)
            os.fsync(fd)
            partial.replace(path)
            sync_directory(path.parent)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read the times that ``save`` wrote, or return None if there is no file.

        Raises:
            StoreError: The file cannot be read, is damaged, or has another version.
        """
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | OPEN_FLAGS), "rb") as file:
                return validate(cls, validate_json(_File, file.read()).times)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}.") from error
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise StoreError(
                f"{path} cannot be used: {reason}. `llmaas elastic profile` writes a new one."
            ) from error

    def _thread(self, n_threads: int) -> int:
        if n_threads not in self.threads:
            measured = ", ".join(map(str, self.threads))
            raise ConfigError(
                f"times with {n_threads} threads were not measured, only with {measured}; "
                f"`llmaas elastic profile --threads {n_threads}` measures them"
            )
        return self.threads.index(n_threads)


class _File(_Model):
    format: Literal["llmaas-latency"]
    version: Literal[1]
    sha256: str
    times: Mapping[str, Any]
    errors: Mapping[str, Errors]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.sha256 != _digest(self.times):
            raise ValueError("its checksum does not match")
        return self


def latency_path(model: Path, table: str, digest: str | None = None) -> Path:
    """Return the path where the times of a model on this machine are saved.

    Args:
        model: A prepared file.
        table: Name of the table of widths.
        digest: Digest of the file, if it is known.

    Raises:
        ConfigError: The file has no such table.
        StoreError: The file cannot be read.
    """
    elastic = read_elastic(model)
    if elastic is None:
        raise ConfigError(
            f"{model} has no widths; `llmaas elastic prepare {model}` writes a file that has."
        )
    if table not in elastic.tables:
        raise ConfigError(
            f"{model} has no table {table!r} of widths; expected one of {', '.join(elastic.tables)}"
        )
    key = hashlib.sha256((digest or file_digest(model)).encode())
    key.update(Machine.this().model_dump_json().encode())
    key.update(np.array(elastic.levels).tobytes())
    for widths in elastic.tables[table]:
        key.update(widths.groups.tobytes() + widths.neurons.tobytes())
    return DIRECTORY.expanduser() / f"{key.hexdigest()[:32]}.json"


def check_writable(path: Path) -> None:
    """Refuse an unwritable path, before anything is measured.

    Raises:
        StoreError: The path cannot be written.
    """
    with _written(path):
        tempfile.TemporaryFile(dir=path.parent).close()


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Create a file's directory; turn errors of writing into ``StoreError``."""
    with as_store_error(f"cannot write {path}", f" Make {path.parent} a folder with room for it."):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield


def _between(ms: Mapping[int, float], n_tokens: int) -> float:
    numbers, times = zip(*sorted(ms.items()), strict=True)
    i = min(max(int(np.searchsorted(numbers, n_tokens)) - 1, 0), len(numbers) - 2)
    slope = (times[i + 1] - times[i]) / (numbers[i + 1] - numbers[i])
    line: float = times[i] + slope * (n_tokens - numbers[i])
    if n_tokens > numbers[-1]:
        return max(line, times[-1])
    return max(line, times[0] * n_tokens / numbers[0]) if n_tokens < numbers[0] else line


def _digest(times: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(times, sort_keys=True).encode()).hexdigest()


def _shape(times: _Times) -> tuple[int, ...] | None:
    """Return the shape of a table, or None if its rows differ in length."""
    try:
        return np.array(times, dtype=np.float64).shape
    except ValueError:
        return None
