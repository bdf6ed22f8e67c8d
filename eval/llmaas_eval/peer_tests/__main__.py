"""``python -m llmaas_eval.peer_tests``: run llama-cpp-python's tests in every mode and compare."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.peer_tests.compare import as_table, problems
from llmaas_eval.peer_tests.models import write_models
from llmaas_eval.peer_tests.runs import MODES, Run, run_tests
from llmaas_eval.peer_tests.sdist import download, extract
from llmaas_hooks import LlmaasError


def main(argv: Sequence[str] | None = None) -> int:
    """Run every mode; return 0 if all results equal vanilla's, 1 if not, 2 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.peer_tests", description=__doc__)
    parser.add_argument(
        "--sdist", type=Path, help="llama-cpp-python's sdist; default pip downloads it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    args = parser.parse_args(argv)
    version = importlib.metadata.version("llama-cpp-python")
    try:
        runs = _run_all(args.sdist, version)
    except LlmaasError as error:
        sys.stderr.write(f"peer-tests: error: {error}\n")
        return 2
    found = problems(runs)
    sys.stdout.write(as_table(runs) + "\n")
    sys.stdout.writelines(f"{problem}\n" for problem in found)
    n_results = sum(len(outcome.results) for outcome in next(iter(runs.values())).tests.values())
    verdict = f"{len(found)} problems" if found else f"all {n_results} results equal vanilla's"
    sys.stdout.write(f"llama-cpp-python {version}: {verdict}\n")
    if args.json is not None:
        modes = {mode: dataclasses.asdict(run) for mode, run in runs.items()}
        report = {"version": version, "problems": found, "modes": modes}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if found else 0


def _run_all(sdist: Path | None, version: str) -> dict[str, Run]:
    runs = {}
    with tempfile.TemporaryDirectory(prefix="llmaas-peer-tests-") as name:
        folder = Path(name)
        _say(f"tests of llama-cpp-python {version} from {sdist or 'the index'}")
        tests = extract(sdist or download(version, folder), version, folder)
        _say(f"{len(tests)} files; writing models")
        write_models(folder / "models")
        for mode in MODES:
            _say(f"{mode} ...")
            runs[mode] = run_tests(folder, mode)
    return runs


def _say(text: str) -> None:
    sys.stderr.write(f"peer-tests: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
