"""Sparse answers are not interrupted, as their cells cannot be kept; their prompts are."""

from __future__ import annotations

from flash_apps import MIB
from interrupted import opened

from llmaas_hooks import hookimpl


class Sparse:
    """Records which batches of the first request are computed sparsely."""

    def __init__(self):
        self.native, self.turns, self.found = None, None, []

    @hookimpl
    def llmaas_native_context(self, context):
        self.native = context

    @hookimpl(trylast=True)
    def llmaas_decode(self, step):
        if not self.turns.is_other:
            self.found.append((step.n_tokens == 1, self.native.sparse_tokens))


def test_prompts_of_sparse_answers_are_interrupted(sparse, tmp_path):
    witness = Sparse()
    table = {"mode": "sparse", "arena": 4 * MIB}
    with opened(sparse, tmp_path, extra=witness, flash_weights=table) as turns:
        witness.turns = turns
        prompt = list(range(300, 350))
        turns.answer(prompt=prompt)
        alone, witness.found = witness.found, []
        turns.answer([1, 3, 6], prompt=prompt)
        assert len(turns.replies) == 2  # before the answer's first sparse cell
        single = [is_sparse for is_single, is_sparse in witness.found if is_single]
        assert single == [is_sparse for is_single, is_sparse in alone if is_single]
        assert all(single)
        assert turns.left == [50, 26, 2, 0]
