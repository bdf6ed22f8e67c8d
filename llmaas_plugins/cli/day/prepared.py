"""Files that the plugins need for the demo's model: made for the packaged one, found for others."""

from __future__ import annotations

import contextlib
import os
import shutil
import site
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmaas_hooks import LlmaasError
from llmaas_plugins.cli.given_text import conversation_files
from llmaas_plugins.cli.setup.processes import completed, error_of
from llmaas_plugins.cli.setup.steps import Job, Step, steps_of
from llmaas_plugins.config import Config
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.model.made_files import file_in_place_of
from llmaas_plugins.reference_model import reference_model_path

__all__ = ["STEPS", "Prepared", "environment", "found_files", "made_files", "own_home"]

_QUICK: Mapping[str, tuple[str, ...]] = {
    "prepare": ("--tokens", "512"),
    "profile": ("--prompts", "32,320"),
}
"""Options that make the steps of ``llmaas setup`` quick enough for the demo."""
_LEFT_OUT = frozenset({"learn"})
STEPS = ("prepare", "pack", "profile", "datastore")
"""Names of the steps for the packaged model, in their order."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model with what was made for it.

    Attributes:
        model: The model as it was given.
        made: File that apps load in its place; the model itself if there is none.
        packed: Packed weights; None if there are none.
        table: Widths of the levels whose times are known; None without.
        store: Folder of the datastore; None without.
        left_out: Why a plugin is left out, by its name.
    """

    model: Path
    made: Path
    packed: Path | None
    table: str | None
    store: Path | None
    left_out: Mapping[str, str]


def made_files(folder: Path, n_threads: int, begin: Callable[[str], None]) -> Prepared:
    """Prepare the packaged model in ``folder``, with the steps of ``llmaas setup``.

    Args:
        folder: Folder for all files.
        n_threads: CPU threads whose times are measured.
        begin: Function that is told the name of each step.

    Raises:
        LlmaasError: A step failed.
    """
    from llmaas_plugins.flash_weights.packed import packed_path

    model, chats = folder / reference_model_path().name, folder / "chats.jsonl"
    shutil.copyfile(reference_model_path(), model)
    with chats.open("w", encoding="utf-8") as file:
        for path in conversation_files():  # the day has the last one of each
            file.write(path.read_text(encoding="utf-8").splitlines()[0] + "\n")
    job = Job(model, file_digest(model), (chats,), _LEFT_OUT)
    job.folder.mkdir(parents=True)
    for step in steps_of(job):
        begin(step.name)
        _run(step, (*_QUICK.get(step.name, ()), *_threads(step, n_threads)))
    return Prepared(model, job.made, packed_path(job.made), "uniform", job.store, {})


def found_files(model: Path, config: Config, n_threads: int) -> Prepared:
    """Find what ``llmaas setup`` made for a model and named in the configuration.

    Raises:
        ConfigError: A file is not what it was.
    """
    from llmaas_plugins.cli.flash.pack import is_packed, tensors_of
    from llmaas_plugins.flash_weights.packed import packed_path

    then, left_out = f"`llmaas setup {model}", dict[str, str]()
    made = file_in_place_of(model, config.models, f"{then}`")
    table, problem = _levels(made, config, n_threads)
    if problem:
        left_out["elastic"] = f"{problem}; {then}` makes them"
    packed = packed_path(made) if is_packed(made, tensors_of(made)) else None
    if packed is None:
        left_out["flash_weights"] = f"{made.name} has no packed weights; {then}` makes them"
    store = config.plugins["knn_lm"].values.get("store") if "knn_lm" in config.plugins else None
    if store is None:
        left_out["knn_lm"] = f"found no datastore; {then} --chats EXPORT` makes one"
    for name, plugin in config.plugins.items():
        if not plugin.enabled:
            left_out[name] = f"{config.file} switches it off"
    return Prepared(
        model, made, packed, table, None if store is None else Path(str(store)), left_out
    )


def own_home(folder: Path) -> dict[str, str]:
    """Return variables with which this process and its children keep their caches in ``folder``."""
    return {
        "HOME": str(folder),
        "PYTHONUSERBASE": site.getuserbase(),  # children find the packages that they found before
        "XDG_CACHE_HOME": str(folder / ".cache"),
    }


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Change variables of this process, which its children inherit, inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        os.environ.update(variables)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -- inside --------------------------------------------------------------------------------------


def _run(step: Step, options: tuple[str, ...]) -> None:
    done = completed((*step.arguments, *options), shows_errors=False)
    if done.returncode:
        raise LlmaasError(f"step {step.name} failed: {error_of(done)}")


def _threads(step: Step, n_threads: int) -> tuple[str, ...]:
    return ("--threads", str(n_threads)) if step.name == "profile" else ()


def _levels(made: Path, config: Config, n_threads: int) -> tuple[str | None, str]:
    """Return the widths whose times are known, or None and why there are none."""
    from llmaas_plugins.elastic.latency import Latency, latency_path
    from llmaas_plugins.elastic.metadata import read_elastic

    elastic = read_elastic(made)
    if elastic is None:
        return None, f"{made.name} has no levels"
    own = config.plugins["elastic"].values.get("table") if "elastic" in config.plugins else None
    table = str(own or ("searched" if "searched" in elastic.tables else "uniform"))
    latency = Latency.load(latency_path(made, table))
    if latency is None or n_threads not in latency.threads:
        return None, f"found no times of its levels with {n_threads} threads"
    return table, ""
