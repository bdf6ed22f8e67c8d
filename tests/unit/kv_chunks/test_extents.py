"""First-fit space in pages: free space is found, and never allocated twice."""

from __future__ import annotations

import pytest

from llmaas_plugins.kv_chunks.store.extents import PAGE, ExtentAllocator, page_round


@pytest.fixture
def space():
    return ExtentAllocator(8 * PAGE)


def fill(space):
    return [space.allocate(PAGE) for _ in range(space.capacity // PAGE)]


@pytest.mark.parametrize(("n", "rounded"), [(0, 0), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_sizes_are_rounded_up_to_pages(n, rounded):
    assert page_round(n) == rounded


def test_partial_last_page_is_not_used():
    space = ExtentAllocator(2 * PAGE + 100)
    assert space.capacity == 2 * PAGE
    assert fill(space) == [0, PAGE]
    assert space.allocate(1) is None


def test_no_space_at_all():
    space = ExtentAllocator(PAGE - 1)
    assert space.capacity == 0
    assert space.allocate(1) is None
    assert not space.claim(0, 1)


def test_first_fit_takes_the_lowest_run_that_is_long_enough(space):
    fill(space)
    space.release(PAGE, PAGE)
    space.release(3 * PAGE, 2 * PAGE)
    space.release(6 * PAGE, 2 * PAGE)
    assert space.allocate(PAGE + 1) == 3 * PAGE
    assert space.allocate(1) == PAGE
    assert space.allocate(3 * PAGE) is None
    assert space.used == 6 * PAGE


@pytest.mark.parametrize("order", [(2, 3, 4), (4, 3, 2), (2, 4, 3), (3, 2, 4)])
def test_neighbors_that_become_free_are_one_run_again(space, order):
    fill(space)
    for page in order:
        space.release(page * PAGE, PAGE)
    assert space.allocate(3 * PAGE) == 2 * PAGE
    assert space.used == space.capacity


def test_everything_released_is_everything_free(space):
    for page in (5, 1, 7, 3, 0, 2, 6, 4):
        assert space.claim(page * PAGE, PAGE)
    for page in (0, 2, 4, 6, 7, 5, 3, 1):
        space.release(page * PAGE, PAGE)
    assert space.used == 0
    assert space.allocate(space.capacity) == 0


def test_claim_takes_exactly_that_place(space):
    assert space.claim(2 * PAGE, PAGE + 1)
    assert space.used == 2 * PAGE
    assert space.allocate(3 * PAGE) == 4 * PAGE
    assert space.allocate(2 * PAGE) == 0


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (2 * PAGE, PAGE),  # taken
        (PAGE, 2 * PAGE),  # its end is taken
        (3 * PAGE, PAGE),  # the second page of it
        (7 * PAGE, 2 * PAGE),  # beyond the end
        (8 * PAGE, PAGE),
        (100, PAGE),  # no page
        (-PAGE, PAGE),
        (0, 0),
        (0, -PAGE),
        (2**62, PAGE),
        (0, 2**62),
    ],
)
def test_claim_refuses_what_is_taken_or_outside(space, offset, size):
    assert space.claim(2 * PAGE, 2 * PAGE)
    assert not space.claim(offset, size)
    assert space.used == 2 * PAGE
    assert space.allocate(4 * PAGE) == 4 * PAGE  # nothing was lost


@pytest.mark.parametrize(("offset", "size"), [(0, PAGE), (PAGE, PAGE), (0, 4 * PAGE), (3, PAGE)])
def test_release_of_something_free_is_an_error(space, offset, size):
    space.claim(2 * PAGE, PAGE)
    with pytest.raises(ValueError, match="free already"):
        space.release(offset, size)
    assert space.used == PAGE


def test_double_release_is_an_error(space):
    space.allocate(2 * PAGE)
    space.release(0, 2 * PAGE)
    with pytest.raises(ValueError, match="free already"):
        space.release(0, 2 * PAGE)
    assert space.used == 0


def test_shrink_gives_back_whole_pages_of_the_tail(space):
    assert space.allocate(4 * PAGE) == 0
    space.shrink(0, 4 * PAGE, 3 * PAGE + 1)
    assert space.used == 4 * PAGE
    space.shrink(0, 4 * PAGE, PAGE + 1)
    assert space.used == 2 * PAGE
    assert space.allocate(6 * PAGE) == 2 * PAGE
    space.release(0, PAGE + 1)
    assert space.allocate(2 * PAGE) == 0


def test_free_runs_within_a_range():
    space = ExtentAllocator(10 * PAGE)
    for page in (0, 3, 4, 8):
        assert space.claim(page * PAGE, PAGE)
    assert space.free_within(0, 10 * PAGE) == [
        (PAGE, 2 * PAGE), (5 * PAGE, 3 * PAGE), (9 * PAGE, PAGE),
    ]  # fmt: skip
    assert space.free_within(2 * PAGE, 6 * PAGE) == [(2 * PAGE, PAGE), (5 * PAGE, PAGE)]
    assert space.free_within(3 * PAGE, 5 * PAGE) == []
    assert space.free_within(4 * PAGE, 4 * PAGE) == []
    assert ExtentAllocator(0).free_within(0, PAGE) == []


def test_longest_run():
    space = ExtentAllocator(10 * PAGE)
    assert space.longest() == 10 * PAGE
    for offset in (0, 3, 5, 9):
        assert space.claim(offset * PAGE, PAGE)
    assert space.longest() == 3 * PAGE
    assert ExtentAllocator(0).longest() == 0
