"""Steps of ``llmaas elastic prepare``: text, scores, uniform widths, searched widths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llmaas_hooks import ConfigError, StoreError
from llmaas_plugins.cli.elastic.estimates import N_PROBED, probed
from llmaas_plugins.cli.elastic.plan import (
    ADD,
    WRITE_UNIFORM,
    Done,
    disk_bytes,
    memory_bytes,
    planned,
)
from llmaas_plugins.cli.elastic.score import (
    checkpoint_of,
    keep,
    scored,
    source_blocks,
    written_text,
)
from llmaas_plugins.cli.elastic.search import fitted, n_search_tokens, searched
from llmaas_plugins.cli.elastic.steps import Step, Steps
from llmaas_plugins.cli.elastic.text import (
    N_TOKENS,
    Text,
    check_calibration,
)
from llmaas_plugins.cli.elastic.writing import n_written_bytes, write_target
from llmaas_plugins.cli.files import check_target
from llmaas_plugins.cli.models import identified
from llmaas_plugins.cli.output import size_text
from llmaas_plugins.machine import room

if TYPE_CHECKING:
    from llmaas_plugins.elastic.metadata import Elastic
    from llmaas_plugins.elastic.reordering import Order
    from llmaas_plugins.elastic.units import Blocks, Scores

__all__ = ["Preparation"]


class Preparation:
    """One run of the command, with its options checked.

    Attributes:
        target: Path of the prepared file.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the options, and read what an earlier run left.

        Raises:
            ConfigError: An option is impossible, or the model cannot be elastic.
            StoreError: A file cannot be read or written.
        """
        from llmaas_plugins.elastic.prepared_file import check_is_another
        from llmaas_plugins.elastic.scores import scores_path
        from llmaas_plugins.elastic.units import is_q8_0
        from llmaas_plugins.model.quantize import check_original

        self._args = args
        self._blocks = source_blocks(args.model, cuts_keys_values=args.cut_keys_values)
        self.target = args.output or args.model.with_suffix(".elastic.gguf")
        check_target(self.target, "-o")
        check_is_another(args.model, self.target)
        self._scores_path = args.scores or scores_path(args.model)
        if args.scores is not None and not args.scores.is_file():
            check_target(args.scores, "--scores")
        if args.quantize is not None:
            check_original(args.model)
        check_calibration(args)
        self._is_apart = args.quantize is None and not args.keep_blocks and is_q8_0(args.model)
        self._found_scores = self._read_scores()
        self._checkpoint = checkpoint_of(
            args,
            self.target,
            quantize=args.quantize,
            keep_blocks=args.keep_blocks,
            cut_keys_values=args.cut_keys_values,
        )
        self._planned = self._plan()
        self._steps = Steps(self._planned, self._say)

    def announce(self) -> None:
        """Print the steps with estimates, and what the options mean."""
        path, scores = self._scores_path, self._found_scores
        if scores is not None:
            found = scores.calibration
            self._say(
                f"{path}: scores by {found.method} on {found.n_tokens:,} tokens, computed earlier."
            )
            if self._args.text or self._args.tokens or self._args.gradients:
                self._say(
                    "--text, --tokens and --gradients do not change them; remove "
                    f"{path} to compute scores again."
                )
        if self._is_apart:
            self._say(
                "ffn_down is quantized again, so that neurons move one by one (--keep-blocks)."
            )
        self._announce_shares()
        self._say(
            f"steps, with times estimated from a probe of {N_PROBED} tokens and up to 32 MiB on "
            "this machine, as busy as it is:"
        )
        for line in self._steps.lines():
            self._say(line)
        memory = size_text(memory_bytes(self._args, self._blocks))
        disk = size_text(disk_bytes(self._args))
        self._say(f"memory: at most about {memory}; disk: about {disk} in {self.target.parent}")
        free = room(self.target.parent).free_bytes
        if free < disk_bytes(self._args):
            self._say(f"only {size_text(free)} are free there: make room, or choose -o FILE.")

    def _announce_shares(self) -> None:
        """Print what narrow levels really are if keys and values are whole and as large as queries.

        Where query heads share keys and values, these are small.
        """
        from llmaas_plugins.elastic.uniform import LEVELS

        blocks, least = self._blocks, LEVELS[-1]
        if blocks.heads_per_group == 1 and not blocks.cuts_keys_values:
            self._say(
                f"keys and values stay whole: level {least} computes with "
                f"{100 * blocks.computed_share(least):.0f} % of the blocks' bytes "
                "(--cut-keys-values cuts them, too)."
            )

    def estimates(self) -> dict[str, Any]:
        """Return the estimates as JSON types."""
        return {
            "path": str(self.target),
            "steps": [step._asdict() for step in self._planned],
            "speeds": self._speeds._asdict(),
            "memory_bytes": memory_bytes(self._args, self._blocks),
            "disk_bytes": disk_bytes(self._args),
        }

    def run(self) -> Elastic:
        """Do the steps; return the metadata of the prepared file."""
        with self._checkpoint:
            return self._run()

    def result(self, elastic: Elastic) -> tuple[dict[str, Any], Iterator[str]]:
        """Return the report of the command, and its lines."""
        n_bytes = self.target.stat().st_size
        report = {
            "path": str(self.target),
            "n_bytes": n_bytes,
            "levels": list(elastic.levels),
            "tables": {name: name in elastic.biases for name in elastic.tables},
        }
        return report, self._lines(elastic, n_bytes)

    def _run(self) -> Elastic:
        from llmaas_plugins.elastic.prepared_file import replace_metadata
        from llmaas_plugins.elastic.reordering import order_by

        args, steps, checkpoint = self._args, self._steps, self._checkpoint
        text = written_text(args, checkpoint, steps.bar) if self._needs_text else None
        scores = self._found_scores or self._scored(text)
        elastic = self._uniform(order_by(self._movable, scores), scores)
        if text is None or not self._is_improved:
            return elastic
        n_tokens = n_search_tokens(elastic.blocks, args.tokens or N_TOKENS)
        if args.is_searched:
            elastic = searched(self.target, elastic, text, n_tokens, checkpoint, steps.bar)
        if args.compensate:
            elastic = fitted(self.target, elastic, text, n_tokens, steps.bar)
            for name, table in elastic.tables.items():
                n_kept = (
                    int(elastic.biases[name].any(axis=(1, 2, 3)).sum())
                    if name in elastic.biases
                    else 0
                )
                self._say(f"biases of {name}: kept for {n_kept} of {len(table)} levels.")
        with steps.bar(ADD, "B", self.target.stat().st_size) as bar:
            for n_done in replace_metadata(self.target, elastic):
                bar.update(n_done)
        return elastic

    def _scored(self, text: Text | None) -> Scores:
        assert text is not None
        scores = scored(self._args, self._blocks, text, self._checkpoint, self._steps.bar)
        try:
            self._say(keep(self._args, self._scores_path, scores))
        except StoreError as error:  # go on, because computing the scores was the long part
            self._say(f"scores are not kept: {error} `--scores FILE` keeps them elsewhere.")
        return scores

    def _uniform(self, order: Order, scores: Scores) -> Elastic:
        """Write the file with uniform widths, unless an earlier run did; return its metadata."""
        from llmaas_plugins.elastic.metadata import read_elastic

        if not self._is_written(order):
            args, total = self._args, n_written_bytes(self._args)
            with self._steps.bar(WRITE_UNIFORM, "B", total) as bar:
                write_target(args, self.target, order, scores, bar.update, is_apart=self._is_apart)
            self._checkpoint.keep({"target": self._target_digest(), "losses": np.empty(0)})
            self._checkpoint.save()
            self._say(f"{self.target} can be used now: it has uniform widths.")
        elastic = read_elastic(self.target)
        assert elastic is not None
        return replace(elastic, tables={"uniform": elastic.tables["uniform"]}, biases={})

    def _is_written(self, order: Order) -> bool:
        """Return whether an earlier run wrote the file, and it is still the same."""
        from llmaas_plugins.elastic.prepared_file import prepared_order

        kept = self._checkpoint.get("target")
        found = None if kept is None else prepared_order(self.target)
        if kept is None or found is None:
            return False
        is_same = (found.groups == order.groups).all() and (found.neurons == order.neurons).all()
        return bool(is_same) and np.array_equal(kept, self._target_digest())

    def _target_digest(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(bytes.fromhex(identified(self.target)), np.uint8)

    def _read_scores(self) -> Scores | None:
        from llmaas_plugins.elastic.scores import read_scores

        if not self._scores_path.exists():
            return None
        scores = read_scores(self._scores_path, self._blocks, self._args.model)
        if scores.layers is None:
            raise ConfigError(
                "the scores have no scores of layers; run `llmaas elastic score` to compute them."
            )
        return scores

    # -- what it takes ---------------------------------------------------------------------------

    @property
    def _is_improved(self) -> bool:
        """Whether something follows the uniform widths."""
        return bool(self._args.is_searched or self._args.compensate)

    @property
    def _movable(self) -> Blocks:
        """The model's blocks, with the granule in which neurons move."""
        return replace(self._blocks, granule=1) if self._is_apart else self._blocks

    @property
    def _needs_text(self) -> bool:
        return self._found_scores is None or self._is_improved

    def _plan(self) -> list[Step]:
        from llmaas_plugins.elastic.reordering import order_by

        args, is_written, scores = self._args, False, self._found_scores
        if scores is not None:
            is_written = self._is_written(order_by(self._movable, scores))
        done = Done(self._checkpoint.get("text 0") is not None, scores is not None, is_written)
        self._speeds = probed(args.model, self._blocks, self.target, is_apart=self._is_apart)
        return planned(args, self._blocks, self._speeds, done, is_apart=self._is_apart)

    def _lines(self, elastic: Elastic, n_bytes: int) -> Iterator[str]:
        n_levels = len(elastic.levels)
        yield (
            f"{self.target}: {n_bytes / 1e6:,.0f} MB, {n_levels} levels: `llmaas elastic show "
            f"{self.target}`."
        )
        least = elastic.blocks.share(elastic.tables["uniform"][-1])
        if least > elastic.levels[-1]:
            yield (
                f"levels below {least:.2f} use that much, too: one group and {elastic.step} "
                "neurons stay in each layer; other weight types have smaller blocks"
            )

    def _say(self, line: str) -> None:
        """Print a line, on stderr if the result is printed as JSON."""
        print(line, file=sys.stderr if self._args.json else sys.stdout, flush=True)
