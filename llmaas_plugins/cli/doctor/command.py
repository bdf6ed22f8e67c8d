"""``llmaas doctor``: whether the suite can run here, and with which settings."""

from __future__ import annotations

import dataclasses
import itertools
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_plugins.cli.doctor.diagnosis import diagnose
from llmaas_plugins.cli.options import add_config_option
from llmaas_plugins.cli.output import counted, one_line, print_report, setting_text
from llmaas_plugins.memory.owners import owner_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from llmaas_plugins.cli.doctor.findings import Finding

__all__ = ["add_parser", "doctor"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check versions, patches, directories; show the effective configuration",
        description="Check versions, patches and directories, and show each setting and where it "
        "came from; `llmaas -v doctor` also lists checks that passed and settings left at their "
        "defaults. Exit status 1 means that something in the configuration would not work.",
    )
    add_config_option(parser)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="GGUF",
        help="also open this model as an app would, with the configured plugins, and report which "
        "plugins serve it, what the others lack, and who has which memory",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print every finding; return 0 if there is no problem, else 1."""
    findings = diagnose(args.config, args.model)
    problems = [finding for finding in findings if finding.problem is not None]
    rows = [dataclasses.asdict(finding) for finding in findings]
    verdict = f"{counted(len(problems), 'problem')} found." if problems else "Everything is fine."
    text = [*_text(findings, is_long=args.verbose > 0), "", verdict]
    if not args.verbose:
        text[-1] += " `llmaas -v doctor` lists every check and setting."
    print_report(args, {"ok": not problems, "findings": rows}, text)
    return 1 if problems else 0


def _text(findings: list[Finding], *, is_long: bool) -> Iterable[str]:
    """Yield the report; ``is_long`` adds checks that only passed, and settings left at defaults."""
    for section, found in itertools.groupby(findings, key=attrgetter("section")):
        yield f"[{section}]"
        n_passed = n_defaults = 0
        for finding in found:
            is_quiet = not is_long and finding.problem is None and finding.next_step is None
            if is_quiet and _is_valueless(finding):
                n_passed += 1
            elif is_quiet and finding.origin == "default":
                n_defaults += 1
            else:
                yield from _lines(finding)
        if n_passed:
            yield f"  ok {n_passed} checks passed"
        if n_defaults:
            yield f"  ok {n_defaults} settings have their defaults"


def _lines(finding: Finding) -> Iterable[str]:
    if isinstance(finding.value, dict):
        yield f"  ok {finding.name}"
        yield from (f"       {one_line(line)}" for line in owner_lines(finding.value))
        return
    mark = "ok" if finding.problem is None else "!!"
    origin = f"   ({finding.origin})" if finding.origin else ""
    value = "" if _is_valueless(finding) else f" = {setting_text(finding.value)}"
    yield one_line(f"  {mark} {finding.name}{value}{origin}")
    if finding.problem is not None:
        yield f"       {one_line(' '.join(finding.problem.split()))}"
    if finding.next_step is not None:
        yield f"       -> {one_line(finding.next_step)}"


def _is_valueless(finding: Finding) -> bool:
    return finding.value is None and finding.origin is None
