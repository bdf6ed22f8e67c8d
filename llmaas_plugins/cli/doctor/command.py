"""``llmaas doctor``: whether the suite can run here, and with which settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmaas_plugins.cli.doctor.diagnosis import diagnose
from llmaas_plugins.cli.options import add_config_option
from llmaas_plugins.cli.output import one_line, print_report

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
        "came from. Exit status 1 means that something in the configuration would not work.",
    )
    add_config_option(parser)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="GGUF",
        help="also open this model as an app would, with the configured plugins, and report which "
        "plugins serve it and what the others lack",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print every finding; return 0 if there is no problem, else 1."""
    findings = diagnose(args.config, args.model)
    problems = [finding for finding in findings if finding.problem is not None]
    rows = [dataclasses.asdict(finding) for finding in findings]
    verdict = f"{len(problems)} problem(s) found." if problems else "Everything is fine."
    print_report(args, {"ok": not problems, "findings": rows}, [*_text(findings), "", verdict])
    return 1 if problems else 0


def _text(findings: list[Finding]) -> Iterable[str]:
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            yield f"[{section}]"
        mark = "ok" if finding.problem is None else "!!"
        origin = f"   ({finding.origin})" if finding.origin else ""
        is_valueless = finding.value is None and finding.origin is None
        value = "" if is_valueless else f" = {finding.value}"
        yield one_line(f"  {mark} {finding.name}{value}{origin}")
        if finding.problem is not None:
            yield f"       {one_line(' '.join(finding.problem.split()))}"
        if finding.next_step is not None:
            yield f"       -> {one_line(finding.next_step)}"
