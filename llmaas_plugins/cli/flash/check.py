"""``llmaas flash check``: verification of packed files."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_hooks import LlmaasError, TensorInfo
from llmaas_plugins.cli.flash.pack import tensors_of
from llmaas_plugins.cli.models import add_model_action, identified
from llmaas_plugins.cli.output import counted, print_report, printable, progress_bar, size_text

if TYPE_CHECKING:
    from llmaas_plugins.flash_weights.container_file import Kind

__all__ = ["add_check"]

Problem = Callable[[Path, Path, Mapping[str, TensorInfo]], str | None]


def add_check(actions: Any) -> None:
    """Register ``check``."""
    parser = add_model_action(
        actions,
        "check",
        check,
        "verify the files that `pack` wrote",
        "Read the files that `llmaas flash pack` wrote for a model, and verify their checksums. "
        "Exit status 1 means that a file is damaged or another model's, or that there is none.",
        is_loaded=True,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def check(args: argparse.Namespace) -> int:
    """Verify a model's packed and channel files; return 0 if any exist and are sound, else 1."""
    from llmaas_plugins.flash_weights.channels import CHANNEL_FILE, channel_path
    from llmaas_plugins.flash_weights.packed import PACKED_FILE, packed_path, packed_problem

    model = args.model
    tensors = tensors_of(model)
    files: list[tuple[Path, Kind, Problem]] = [
        (packed_path(model), PACKED_FILE, packed_problem),
        (channel_path(model), CHANNEL_FILE, _channel_problem),
    ]
    if any(path.exists() for path, _, _ in files):
        identified(model)  # its files are for this digest
    reports = [
        _checked(path, kind, functools.partial(problem, path, model, tensors))
        for path, kind, problem in files
        if path.exists()
    ]
    nothing = f"{model} has no packed file and no channel file. `llmaas flash pack` makes them."
    lines = _text(model, reports) if reports else [nothing]
    print_report(args, {"model": str(model), "files": reports}, lines)
    return 1 if not reports or any(report["problems"] for report in reports) else 0


def _checked(path: Path, kind: Kind, problem: Callable[[], str | None]) -> dict[str, Any]:
    from llmaas_plugins.flash_weights.channel_header import distilled_in
    from llmaas_plugins.flash_weights.container_file import ContainerFile

    report: dict[str, Any] = {"file": str(path), "kind": kind.name}
    report |= {"bytes": path.stat().st_size, "tensors": 0, "distilled": None}
    try:
        with ContainerFile(path, kind) as file:
            report["tensors"] = len(file.header.parts)
            with progress_bar(f"checking {path.name}", "B", file.header.n_bytes) as bar:
                problems = list(_damaged(file, bar))
        problems += filter(None, [] if problems else [problem()])
        if not problems:
            about = distilled_in(file.header.fields)
            report["distilled"] = about and str(about)
    except LlmaasError as error:
        problems = [str(error)]
    return report | {"problems": problems}


def _damaged(file: Any, bar: Any) -> Iterator[str]:
    for name, n_bytes, is_whole in file.check():
        bar.update(n_bytes)
        if not is_whole:
            yield f"{printable(name)} differs from what was written"


def _channel_problem(path: Path, model: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """Open the channel file, which raises an error if it is unusable."""
    from llmaas_plugins.flash_weights.channels import open_channels

    open_channels(path, model, tensors)


def _text(model: Path, reports: list[dict[str, Any]]) -> Iterator[str]:
    from llmaas_plugins.flash_weights.packed import PACKED_FILE

    for report in reports:
        n_problems = len(report["problems"])
        verdict = "sound" if not n_problems else counted(n_problems, "problem")
        of = f"{report['tensors']} tensors, {size_text(report['bytes'])}"
        about = f", {report['distilled']}" if report["distilled"] else ""
        yield f"{report['file']}: {of}{about}: {verdict}"
        yield from (f"  {problem}" for problem in report["problems"])
        if n_problems and PACKED_FILE.command not in " ".join(report["problems"]):
            option = "" if report["kind"] == PACKED_FILE.name else "--sparse "
            yield f"  `llmaas flash pack {option}{model}` writes it again."
