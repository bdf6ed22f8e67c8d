"""``python -m llmaas_eval.deadlines``: promises of latency that are kept on an idle machine.

It makes a random model, measures its levels' times as ``llmaas elastic profile``
does, and then serves requests with the promises of ElastiLM's six apps (Table 3).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from llmaas_eval.deadlines.model import write_model
from llmaas_eval.deadlines.report import report
from llmaas_eval.deadlines.study import APPS, KINDS, Setting, measure
from llmaas_eval.models import SHAPE_1B, SHAPE_200M, SHAPE_TINY
from llmaas_eval.results import write
from llmaas_plugins.cli.main import main as llmaas

__all__ = ["main"]

_SHAPES = {"200m": SHAPE_200M, "1b": SHAPE_1B}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the output; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m llmaas_eval.deadlines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--requests", type=int, default=40, help="requests of each app and kind; %(default)s")
    add("-o", "--output", type=Path, default=Path("deadlines"), help="folder for the results")
    add("--shape", choices=_SHAPES, default="200m", help="shape of the model; %(default)s")
    add("--scorer", help="let requests read shorter prompts, with words judged by this scorer")
    add("--quick", action="store_true", help="two requests of a tiny model, as a check only")
    args = parser.parse_args(argv)
    setting = Setting(2, 40, 8, 3) if args.quick else Setting(args.requests)
    setting = replace(setting, scorer=args.scorer)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), SHAPE_TINY if args.quick else _SHAPES[args.shape])
        lengths = "8,16,32,64" if args.quick else "16,32,64,128,256"
        if code := llmaas(["elastic", "profile", str(model), "--prompts", lengths]):
            return code
        n = setting.n_requests * (len(APPS) + 1) * len(KINDS)
        with tqdm(total=n, desc="requests", disable=None) as bar:
            samples = measure(model, setting, bar.update)
    rows = [sample._asdict() for sample in samples]
    text = write(args.output / "deadlines.json", asdict(setting), rows, report)
    sys.stdout.write(f"{text}\n")
    return 0
