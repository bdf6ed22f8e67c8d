"""A run of ``llmaas setup``: its steps, what earlier runs did, and the configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llmaas_hooks import ConfigError
from llmaas_plugins.cli.progress_folder import progress_folder
from llmaas_plugins.cli.setup.config_text import Settings, config_text, write_config
from llmaas_plugins.cli.setup.record import Record, folder_of
from llmaas_plugins.cli.setup.steps import Job, Step, digests_of, improving_steps, run, steps_of
from llmaas_plugins.files.file_bytes import as_store_error
from llmaas_plugins.model.digest import file_digest

__all__ = ["Run"]


class Run:
    """A run for one model.

    Attributes:
        job: The model to set up, and how.
        config: Path of the configuration.
        steps: Steps of the job.
        folder: Folder of the record and of the log.
    """

    def __init__(
        self, job: Job, config: Path, memory: str | None, say: Callable[[str], None]
    ) -> None:
        """Read what earlier runs did.

        Raises:
            StoreError: The model cannot be read.
        """
        self.job, self.config, self._memory, self.say = job, config, memory, say
        self.steps = steps_of(job)
        self._digest = file_digest(job.model)
        self.folder = folder_of(self._digest)
        self._record = Record(self.folder)

    def check_made(self) -> None:
        """Refuse to overwrite a prepared file that somebody else made.

        Raises:
            ConfigError: There is such a file.
        """
        made = self.job.made
        if made == self.job.model or not made.exists() or self._record.owns(made):
            return
        raise ConfigError(
            f"{made} exists, and `llmaas setup` did not make it. `llmaas setup {made}` uses it; or "
            "remove it to make it anew."
        )

    def is_done(self, step: Step) -> bool:
        """Return whether an earlier run did a step with the files as they are now."""
        if not all(path.exists() for path in step.inputs):
            return False
        return self._record.has(step.name, step.key(digests_of(step, self.job)))

    def all(self) -> dict[str, float]:
        """Do the steps that are not done, and write the configuration.

        Returns:
            The seconds of each step.

        Raises:
            ConfigError: A step failed.
            StoreError: A file cannot be written, or another run is at work.
        """
        with self.locked():
            self._record.own(self.job.made)
            seconds = self.do(self.steps)
            self.write("searched" if self.is_improved() else self.job.table or "uniform")
        return seconds

    def do(self, steps: Sequence[Step]) -> dict[str, float]:
        """Do the steps that are not done; return the seconds of each."""
        seconds = {}
        for i, step in enumerate(steps, 1):
            if self.is_done(step):
                continue
            self.say(f"step {i} of {len(steps)}: {step.what}")
            started = time.perf_counter()
            result = run(step)
            self._record.keep(step.name, step.key(digests_of(step, self.job)), result)
            seconds[step.name] = round(time.perf_counter() - started, 1)
        return seconds

    def is_improved(self) -> bool:
        """Return whether better widths were found, timed and compared."""
        steps = improving_steps(self.job)
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
            digest=self._digest,
            made=job.made,
            made_digest=file_digest(job.made),
            table=table if has_levels else None,
            is_packed="pack" in names,
            has_chats="datastore" in names,
            memory=self._memory,
        )
        write_config(self.config, config_text(settings))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs for this model out.

        Raises:
            StoreError: Another run is at work, or the folder cannot be made.
        """
        with as_store_error(f"cannot make {self.folder}"):
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with progress_folder(self.folder):
            self._record = Record(self.folder)
            yield
