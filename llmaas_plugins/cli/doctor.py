"""``llmaas doctor``: will it run here, and with which settings."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from llmaas_plugins.cli.diagnosis import Finding, diagnose

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

__all__ = ["add_parser", "doctor"]


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser(
        "doctor", help="check versions, patches, directories; show the effective configuration"
    )
    parser.add_argument("--config", metavar="FILE", help="llmaas.toml (default: $LLMAAS_CONFIG)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Print every finding; 0 when nothing is wrong, else 1."""
    findings = diagnose(args.config)
    problems = [finding for finding in findings if finding.problem is not None]
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": not problems, "findings": rows}, indent=2, default=str))
    else:
        print("\n".join(_text(findings)))
        print(f"\n{len(problems)} problem(s) found." if problems else "\nEverything is fine.")
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
        yield f"  {mark} {finding.name}{value}{origin}"
        if finding.problem is not None:
            yield f"       {' '.join(finding.problem.split())}"
            yield f"       -> {finding.next_step}"
