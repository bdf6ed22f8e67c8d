"""Drafts from stored texts: where a context occurred before, and how many tokens to propose."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from forking import in_child
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp.llama_speculative import LlamaDraftModel

from llmaas_plugins.knn_lm.drafts import registry as proposing
from llmaas_plugins.knn_lm.drafts.draft_model import BATCH_COSTS, DatastoreDraft
from llmaas_plugins.knn_lm.drafts.suffix_array import LONGEST, SuffixIndex, match_within

TEXT = np.arange(100, 200, dtype=np.int32)
FREE = {1: 1.0, 4: 1.0, 16: 1.0}
"""A batch of any size takes as long as one token."""
N_AHEAD = 6

texts = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=4)
contexts = st.lists(st.integers(0, 3), min_size=1, max_size=50)


def tokens(values):
    return np.array(values, dtype=np.intc)


def occurrences(text, end):
    """Yield the text after each place where ``end`` occurs in ``text``."""
    n = len(end)
    return [
        text[i + n : i + n + N_AHEAD] for i in range(len(text) - n + 1) if text[i : i + n] == end
    ]


def longest(context, text_list):
    """Return the longest end that occurs, and what follows, by trying all lengths."""
    for n in range(min(len(context), LONGEST), 0, -1):
        found = [row for text in text_list for row in occurrences(text, context[-n:])]
        if found:
            return n, sorted(found)
    return 0, []


class TestSuffixIndex:
    @given(texts, contexts)
    def test_finds_the_longest_end_and_what_followed_it(self, text_list, context):
        index = SuffixIndex(map(tokens, text_list))
        length, rows = longest(context, text_list)
        found = index.match(tokens(context), N_AHEAD)
        assert found.length == length
        if len(rows) <= 16:
            assert sorted(found.rows) == rows
        else:  # only some were selected
            assert all(row in rows for row in found.rows)
            assert 8 < len(found.rows) <= 16

    def test_compares_so_many_tokens_at_most(self):
        index = SuffixIndex([TEXT])
        assert index.match(TEXT[:90], N_AHEAD).length == LONGEST

    def test_nothing_matches_across_two_texts(self):
        index = SuffixIndex([tokens([1, 2]), tokens([3, 4])])
        assert index.match(tokens([2, 3]), N_AHEAD)[:2] == (1, [[4]])

    def test_what_is_picked_of_many_occurrences_comes_from_all_of_them(self):
        index = SuffixIndex([tokens([9, 1, n]) for n in range(1000)])
        rows = index.match(tokens([9, 1]), 1).rows
        assert len(rows) == 16
        assert np.ptp(rows) > 900

    @given(texts)
    def test_gives_its_texts_back(self, text_list):
        given_back = SuffixIndex(map(tokens, text_list)).sequences()
        assert [text.tolist() for text in given_back] == text_list

    def test_takes_eight_bytes_a_token(self):
        index = SuffixIndex([TEXT] * 100)
        assert index.n_bytes <= 8.2 * 100 * len(TEXT)

    def test_takes_every_token_of_a_large_vocabulary(self):
        largest = 2**24
        index = SuffixIndex([tokens([largest, 0, largest, 5])])
        assert index.match(tokens([largest, 0, largest]), 2)[:2] == (3, [[5]])


class TestMatchWithin:
    @given(contexts)
    def test_finds_the_longest_end_that_occurs_earlier(self, context):
        length, rows = longest(context, [context[:-1]])
        found = match_within(tokens(context), N_AHEAD)
        assert found.length == length
        assert len(found.rows) == min(len(rows), len(found.rows))

    def test_takes_a_text_that_repeats_itself_to_go_on(self):
        found = match_within(tokens([7, 8, 9, 7, 8, 9, 7]), 8)
        assert found.length == 4
        assert found.rows == [[8, 9, 7, 8, 9, 7, 8, 9]]

    @pytest.mark.parametrize("context", [[], [1], [1, 2, 3]])
    def test_finds_nothing_in_a_text_without_repetition(self, context):
        assert match_within(tokens(context), N_AHEAD).length == 0


def replay(draft, text, start):
    """Say ``text`` and ask for drafts as ``Llama`` does; return each batch's tokens."""
    n, sizes = start, []
    while n < len(text):
        proposed = draft(text[:n]).tolist()
        n_right = 0
        for token in proposed:
            if n + n_right >= len(text) or token != text[n + n_right]:
                break
            n_right += 1
        sizes.append(1 + len(proposed))
        n += n_right + 1
    return sizes


class TestDatastoreDraft:
    def test_is_a_draft_model(self):
        assert isinstance(DatastoreDraft([]), LlamaDraftModel)

    def test_proposes_what_followed(self):
        draft = DatastoreDraft([TEXT], costs=FREE)
        found = draft(TEXT[:40].astype(np.intc))
        assert found.dtype == np.intc
        assert found.tolist() == TEXT[40:55].tolist()

    @pytest.mark.parametrize("stored", [[], [TEXT]], ids=["nothing stored", "never seen"])
    def test_proposes_nothing_for_what_was_never_seen(self, stored):
        assert len(DatastoreDraft(stored, costs=FREE)(tokens([1, 2, 3]))) == 0

    def test_proposes_what_most_of_them_said(self):
        stored = [tokens([1, 2, 3, n, n, n]) for n in (5, 6, 6)]
        assert DatastoreDraft(stored, costs=FREE)(tokens([1, 2, 3])).tolist()[:3] == [6, 6, 6]

    def test_proposes_what_this_text_said_before(self):
        context = tokens([*TEXT[:40], *TEXT[:20]])
        assert DatastoreDraft([], costs=FREE)(context).tolist() == TEXT[20:35].tolist()

    def test_fills_a_batch_of_a_size_that_pays(self):
        """At a stored text's end, too, a batch of five would cost more than one of eight."""
        draft = DatastoreDraft([TEXT], costs=FREE)
        assert draft(tokens(TEXT[:95])).tolist() == [*TEXT[95:], *[TEXT[-1]] * 10]

    @pytest.mark.parametrize("costs", [{1: 1.0, 4: 4.0, 16: 16.0}, {1: 1.0}])
    def test_proposes_nothing_if_a_batch_costs_what_its_tokens_cost(self, costs):
        assert len(DatastoreDraft([TEXT], costs=costs)(tokens(TEXT[:40]))) == 0

    def test_knows_what_is_stored_later(self):
        draft = DatastoreDraft([TEXT], costs=FREE)
        for n in range(1, 40):
            later = tokens(TEXT + 200 * n)
            assert len(draft(later[:40])) == 0
            draft.update(later)
            assert draft(later[:40]).tolist() == later[40:55].tolist()
        assert draft(tokens(TEXT[:40])).tolist() == TEXT[40:55].tolist()
        assert draft.n_bytes < 8.5 * 40 * (len(TEXT) + 1)

    def test_evaluates_a_text_that_it_has_in_few_batches(self):
        sizes = replay(DatastoreDraft([TEXT], costs=FREE), tokens(TEXT), 4)
        assert sizes == [16] * 6

    def test_proposes_less_if_nothing_comes_true(self):
        """The words are known, but the next token always differs from the stored one."""
        rng = np.random.default_rng(0)
        words = rng.integers(0, 1000, (100, 4))
        draft = DatastoreDraft([[*word, *word + 1000] for word in words], costs={1: 1.0, 4: 1.5})
        sizes = []
        for word in words:
            sizes.append(len(draft(tokens(word))))
            draft(tokens([*word, 5000]))
        assert set(sizes[:2]) == {3}
        assert set(sizes[-5:]) == {0}

    def test_proposes_more_the_more_of_it_comes_true(self):
        stored = [tokens(TEXT + 100 * n) for n in range(20)]
        draft = DatastoreDraft(stored)
        sizes = [replay(draft, text, 10) for text in stored]
        assert max(sizes[0][:2]) < 16
        assert sizes[-1][1] == 16

    def test_goes_on_behind_a_word_that_was_replaced(self):
        said = tokens(TEXT)
        said[50] = 9
        draft = DatastoreDraft([TEXT], costs=FREE)
        draft(said[:50])
        assert draft(said[:51]).tolist() == TEXT[51:66].tolist()

    def test_counts_what_became_of_its_proposals(self):
        draft = DatastoreDraft([TEXT], costs=FREE)
        draft(tokens(TEXT[:40]))
        draft(tokens([*TEXT[:50], 7]))
        assert draft.counts == (1, 15, 10)
        draft(tokens([1, 2, 3]))  # another request, so the previous draft's outcome is unknown
        assert draft.counts == (1, 15, 10)

    def test_the_next_turn_of_a_conversation_is_no_outcome(self):
        draft = DatastoreDraft([TEXT], costs=FREE)
        draft(tokens(TEXT[:40]))
        draft(tokens([*TEXT[:40], *range(20)]))
        assert draft.counts == (0, 0, 0)

    def test_keeps_nothing_of_the_array_it_is_shown(self):
        """``Llama`` passes its own array, and writes into it later."""
        array = tokens(TEXT)
        draft = DatastoreDraft([TEXT], costs=FREE)
        draft(array[:40])
        array[:40] = 0
        draft(array[:50])
        assert draft.counts == (0, 0, 0)

    @pytest.mark.parametrize(
        ("n_ctx", "n_proposed"), [(56, 15), (50, 10), (41, 1), (40, 0), (39, 0)]
    )
    def test_stays_within_the_context(self, n_ctx, n_proposed):
        draft = DatastoreDraft([TEXT], costs=FREE)
        draft.n_ctx = n_ctx
        assert len(draft(tokens(TEXT[:40]))) == n_proposed

    def test_equal_calls_have_equal_proposals(self):
        rng = np.random.default_rng(1)
        said = tokens(rng.integers(0, 4, 300))
        stored = [rng.integers(0, 4, 100) for _ in range(20)]
        assert replay(DatastoreDraft(stored), said, 5) == replay(DatastoreDraft(stored), said, 5)

    def test_batches_are_of_sizes_whose_cost_is_known(self):
        rng = np.random.default_rng(1)
        said = tokens(rng.integers(0, 3, 500))
        sizes = replay(DatastoreDraft([said[100:200], said[250:400]]), said, 5)
        assert set(sizes) <= set(BATCH_COSTS)
        assert len(set(sizes)) > 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns about threads
def test_a_child_forked_while_another_thread_looks_at_the_archive_is_not_stuck(
    tmp_path, monkeypatch
):
    proposer = proposing.DraftRegistry(tmp_path, shares=False)
    inside, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def files(_store):
        if os.getpid() == parent:
            inside.set()
            go_on.wait()
        return []

    monkeypatch.setattr(proposing, "_files", files)
    thread = threading.Thread(target=lambda: proposer.drafter(None, None))
    thread.start()
    inside.wait()
    found = in_child(lambda: proposer.drafter(None, None))
    go_on.set()
    thread.join()
    assert found == 0
