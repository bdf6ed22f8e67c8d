"""``python -m llmaas_eval.traces``: write a trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from llmaas_eval.traces import PATTERNS, Settings, generate, write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Write the trace that the command line describes; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m llmaas_eval.traces", description=__doc__)
    default = Settings()
    parser.add_argument("--pattern", choices=PATTERNS, default=default.pattern)
    parser.add_argument("--contexts", type=int, default=default.contexts)
    parser.add_argument("--hours", type=float, default=default.hours)
    parser.add_argument("--rate-minutes", type=float, default=default.rate_minutes)
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--data", type=Path, help="folder with the data sets, for texts")
    parser.add_argument("--arrivals", type=Path, help="CSV of arrivals and lengths, for azure")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = vars(parser.parse_args(argv))
    data, arrivals, output = args.pop("data"), args.pop("arrivals"), args.pop("output")
    try:
        trace = generate(Settings(**args), data, arrivals)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"traces: error: {error}\n")
        return 2
    write_trace(trace, output)
    sys.stdout.write(f"{output}: {len(trace.calls)} calls of {args['contexts']} contexts\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
