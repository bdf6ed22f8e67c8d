"""Report of ``llmaas flash distill``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmaas_plugins.training.distillation import Judged, SparseRecipe
    from llmaas_plugins.training.recovery import Texts

__all__ = ["lines_of", "report_of"]


def report_of(
    recipe: SparseRecipe, texts: Texts, before: Judged, after: Judged, path: Path | None
) -> dict[str, Any]:
    """Return the report.

    Args:
        recipe: How the matrices were distilled.
        texts: Text that was learned from and judged by.
        before: Quality without distillation.
        after: Quality of the file.
        path: Path of the file; None if it was not better, so nothing was written.
    """
    from llmaas_plugins.training.objectives import closure, mean_quality

    means = [(x, mean_quality(before[x]), mean_quality(after[x])) for x in before]
    return {
        "file": None if path is None else str(path),
        "n_tokens": recipe.n_tokens,
        "sparsity": recipe.sparsity,
        "n_prompt": recipe.n_prompt,
        "n_training": int(texts.training.size),
        "n_held_out": int(texts.held_out.size),
        "sparsities": [
            {
                "sparsity": sparsity,
                "kl_before": one.kl,
                "kl": other.kl,
                "perplexity_dense": math.exp(one.whole),
                "perplexity_before": math.exp(one.loss),
                "perplexity": math.exp(other.loss),
                "closure": closure(one, other),
            }
            for sparsity, one, other in means
        ],
    }


def lines_of(report: dict[str, Any]) -> Iterator[str]:
    """Yield the report's lines of text."""
    yield "sparsity   KL before → after   perplexity before → after (dense)   won back"
    for row in report["sparsities"]:
        share = row["closure"]
        won_back = "no gap" if share is None else f"{share:.1%}"
        yield (
            f"{row['sparsity']:8.0%}   {row['kl_before']:9.4f} → {row['kl']:.4f}   "
            f"{row['perplexity_before']:17.3f} → {row['perplexity']:.3f} "
            f"({row['perplexity_dense']:.3f})   {won_back:>8}"
        )
    if report["file"] is None:
        yield "nothing was written: the distilled matrices are no better. Learn from more tokens."
    else:
        yield f"{report['file']}: distilled on {report['n_tokens']:,} tokens"
