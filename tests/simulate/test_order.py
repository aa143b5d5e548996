"""Tasks begin so that workers end together, and results come in the tasks' order."""

from hypothesis import given
from hypothesis import strategies as st

from personafl.simulate.workers.order import begun_order, in_order


def makespan(work: list[int], order: list[int], workers: int = 2) -> int:
    """Return when the last worker ends, if an idle one takes the next task."""
    ends = [0] * workers
    for place in order:
        ends[ends.index(min(ends))] += work[place]
    return max(ends)


def longest_first(work: list[int]) -> list[int]:
    return sorted(range(len(work)), key=lambda place: -work[place])


def test_workers_end_together() -> None:
    work = [5, 5, 3, 4, 6, 4, 6, 3, 3, 6]
    assert makespan(work, list(range(10))) == 25
    assert makespan(work, begun_order(work, 2, 16)) == 23
    work = [48, 34, 39, 19, 35, 19, 20, 38, 44, 46]
    assert makespan(work, longest_first(work)) == 178
    assert makespan(work, begun_order(work, 2, 16)) == 171  # half of it all
    assert makespan([91, 53, 79, 83, 69], begun_order([91, 53, 79, 83, 69], 2, 16)) == 201


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 8), st.integers(1, 5))
def test_every_task_once_and_none_out_of_its_window(work: list[int], window: int, workers: int) -> None:
    order = begun_order(work, workers, window)
    assert sorted(order) == list(range(len(work)))
    assert all(place // window == turn // window for turn, place in enumerate(order))
    assert list(in_order(order, (work[place] for place in order))) == work


@given(st.lists(st.integers(0, 99), max_size=16), st.integers(1, 5))
def test_never_later_than_with_the_longest_first(work: list[int], workers: int) -> None:
    assert makespan(work, begun_order(work, workers, 16), workers) <= makespan(work, longest_first(work), workers)


def test_results_are_handed_on_as_soon_as_it_is_their_turn() -> None:
    begun: list[int] = []

    def results() -> object:
        for place in (1, 0, 2):
            begun.append(place)
            yield place

    found = in_order([1, 0, 2], results())  # type: ignore[arg-type]
    assert next(found) == 0
    assert begun == [1, 0]
    assert list(found) == [1, 2]
