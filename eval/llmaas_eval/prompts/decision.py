"""``python -m llmaas_eval.prompts.decision``: does a tiny model choose better than a table?

    python -m llmaas_eval.prompts.decision --model recall.elastic.gguf

Each prompt is evaluated once with each share of it and each pair of levels. Then settings are
chosen under limits of latency by the best constant, by ElastiLM's two softmaxes (§3.3), and by the
chances of each setting that features of the prompt tell. Every way to choose learns from one half
of the documents and is judged on the other. A stopped run goes on with the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from llmaas_eval.prompts.arms import judged, table_of
from llmaas_eval.prompts.command import finish, kept, parse, parser_of
from llmaas_eval.prompts.encoded import Encoded
from llmaas_eval.prompts.engine import opened
from llmaas_eval.prompts.gap import costs
from llmaas_eval.prompts.outcome_table import LONGEST, SIZES, Grid, measured, prompts
from llmaas_eval.prompts.scorers import ENCODER, encoder_of, scorers_of
from llmaas_eval.prompts.trained_top import TrainedTop
from llmaas_eval.results import load
from llmaas_plugins.model.digest import file_digest
from llmaas_plugins.short_prompts.encoder.body import body_folder, read_body

__all__ = ["main"]

_GRID = Grid((1.0, 0.7, 0.5, 0.3), (1.0, 0.8, 0.7, 0.5, 0.3, 0.2))
_SECONDS = (0.03, 0.0)
"""Times of the tiny model, as shares of the whole model's time to the first token."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, learn, print the tables and write the output; return the exit status."""
    torch.set_num_threads(1)  # as the engine
    parser = parser_of("decision", __doc__, 1500, "prompts")
    parser.add_argument("--trained-top", action="store_true", help="train its layers, too: minutes")
    args, options = parse(parser, argv)
    body = read_body(body_folder())
    with opened(options.model, LONGEST) as engine:
        encoder = file_digest(encoder_of(options.model))
        about = {
            "study": "decision",
            "grid": _GRID,
            "body": body.digest,
            "encoder": encoder,
            **SIZES,
        }
        (score,) = scorers_of(engine, [ENCODER]).values()
        encoded = Encoded(body)
        rows = kept(
            options,
            about,
            prompts(engine, options.data, options.n),
            lambda one: measured(engine, one, _GRID, score, encoded),
        )
    table = table_of(rows, *_GRID)
    ids = [row["features"]["ids"] for row in rows]
    top = TrainedTop(body, ids, table.is_right, table.shape) if args.trained_top else None
    arms = [
        one._asdict() | {"quality": one.quality.tolist()}
        for one in judged(table, costs(load("elastic-time")), _SECONDS, top)
    ]
    documents = {"documents": table.documents.tolist(), "kinds": table.kinds.tolist()}
    return finish(options, "decision", arms, **documents, **_GRID._asdict())


if __name__ == "__main__":
    sys.exit(main())
