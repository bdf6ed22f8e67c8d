"""A run of ``llmaas setup``: its steps, what earlier runs did, and the configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.cli.progress_folder import progress_folder
from llmaas_plugins.cli.setup.config_text import Settings, config_text, write_config
from llmaas_plugins.cli.setup.improver import found_improver
from llmaas_plugins.cli.setup.record import Done, MadeBefore, Record
from llmaas_plugins.cli.setup.steps import (
    WITHOUT,
    Job,
    Step,
    holds,
    improving_steps,
    run,
    steps_of,
)
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.files.partial_file import foreseen
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.short_prompts.encoder.model_file import find_encoder
from llmaas_plugins.signals import signals_wait

__all__ = ["Run"]


class Run:
    """A run for one model.

    Attributes:
        job: The model to set up, and how.
        config: Path of the configuration.
        steps: Steps of the job.
    """

    def __init__(
        self, job: Job, config: Path, memory: str | None, say: Callable[[str], None]
    ) -> None:
        """Read what earlier runs did.

        Raises:
            ConfigError: Somebody else made a file that would be overwritten.
            StoreError: A file cannot be read.
        """
        self.job, self.config, self._memory, self.say = job, config, memory, say
        self.steps = steps_of(job)
        self._record = Record(job.folder)
        if job.is_prepared_here and job.made.exists() and not MadeBefore().has(job.made):
            raise ConfigError(
                f"{job.made} exists, and `llmaas setup` did not make it, or it was changed since. "
                f"`llmaas setup {job.made}` uses it as it is; or move it away to make it anew."
            )

    def is_done(self, step: Step) -> bool:
        """Return whether an earlier run did a step with the files as they are now."""
        if not all(path.exists() for path in step.inputs):
            return False
        done = self._record.get(step.name, step.key(self.job))
        return done is not None and holds(step, self.job, done)

    def all(self) -> dict[str, float]:
        """Do the steps that are not done, and write the configuration.

        Returns:
            The seconds of each step.

        Raises:
            ConfigError: A step failed.
            StoreError: A file cannot be written, or another run is at work.
        """
        seconds = {}
        if not all(map(self.is_done, self.steps)):
            with self.locked():
                seconds = self.do(self.steps)
        self.write("searched" if self.is_searched() else self.job.table or "uniform")
        return seconds

    def do(self, steps: Sequence[Step]) -> dict[str, float]:
        """Do the steps that are not done; return the seconds of each."""
        seconds = {}
        for i, step in enumerate(steps, 1):
            if self.is_done(step):
                continue
            self.say(f"setup, step {i} of {len(steps)}: {step.what}")
            started = time.perf_counter()
            try:
                with self._writing(step):
                    result = run(step)
            except ConfigError as error:
                if step.name not in WITHOUT:
                    raise
                self.say(f"{error} {WITHOUT[step.name]}")
                continue
            done = Done(key=step.key(self.job), result=result, digest=file_digest(self.job.made))
            self._record.keep(step.name, done)
            seconds[step.name] = round(time.perf_counter() - started, 1)
        return seconds

    def is_improved(self) -> bool:
        """Return whether all was done that makes levels better."""
        steps = improving_steps(self.job)
        return self.job.is_prepared_here and all(self.is_done(step) for step in steps)

    def is_searched(self) -> bool:
        """Return whether better widths were found, timed and compared, maybe without the rest."""
        steps = [step for step in improving_steps(self.job) if step.name not in WITHOUT]
        return self.job.is_prepared_here and all(self.is_done(step) for step in steps)

    def write(self, table: str) -> None:
        """Write the configuration with a table of widths.

        Raises:
            ConfigError: Somebody else changed the file.
            StoreError: The file cannot be written.
        """
        job, names = self.job, {step.name for step in self.steps}
        has_levels = job.is_prepared_here or job.table is not None
        settings = Settings(
            model=job.model,
            digest=job.digest,
            made=job.made,
            made_digest=file_digest(job.made),
            table=table if has_levels else None,
            is_packed="pack" in names,
            store=job.store if "datastore" in names else None,
            has_words=has_levels and find_encoder(file_digest(job.made)) is not None,
            memory=self._memory,
        )
        write_config(self.config, config_text(settings))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs for this model out.

        Raises:
            StoreError: Another run is at work, or the folder cannot be made.
        """
        folder = self.job.folder
        with as_store_error(f"cannot make {folder}"):
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as entered:
            try:
                entered.enter_context(progress_folder(folder))
            except StoreError as error:
                raise self._named(error) from error
            self._record = Record(folder)
            yield

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _writing(self, step: Step) -> Iterator[None]:
        """Note that the prepared file is this command's if a step wrote it, stopped or not."""
        if step.name not in {"prepare", "search"}:
            yield
            return
        is_done = False
        with foreseen(self.job.made) as is_written:
            try:
                yield
                is_done = True
            finally:
                if is_done or is_written():
                    with signals_wait():  # else the next run would take the file for the user's
                        MadeBefore().keep(self.job.made)

    def _named(self, error: StoreError) -> StoreError:
        """Name the process that improves the model in the error that it keeps others out."""
        if (process := found_improver(self.job.folder)) is None:
            return error
        return StoreError(
            f"{error} Process {process} improves the levels in the background; `kill {process}` "
            "stops it, and the next run goes on with it."
        )
