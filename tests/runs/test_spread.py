"""Tasks begin longest first, and results come in the tasks' order."""

from hypothesis import given
from hypothesis import strategies as st

from personafl.runs.spread import in_order, longest_first


def makespan(work: list[int], order: list[int], workers: int = 2) -> int:
    """Return when the last worker ends, if an idle one takes the next task."""
    ends = [0] * workers
    for place in order:
        ends[ends.index(min(ends))] += work[place]
    return max(ends)


def test_workers_end_together() -> None:
    work = [5, 5, 3, 4, 6, 4, 6, 3, 3, 6]
    assert makespan(work, list(range(10))) == 25
    assert makespan(work, longest_first(work, 16)) == 23


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 8))
def test_every_task_once_and_none_out_of_its_window(work: list[int], window: int) -> None:
    order = longest_first(work, window)
    assert sorted(order) == list(range(len(work)))
    assert all(place // window == turn // window for turn, place in enumerate(order))
    for start in range(0, len(work), window):
        begun = [work[place] for place in order[start : start + window]]
        assert begun == sorted(begun, reverse=True)
    assert list(in_order(order, (work[place] for place in order))) == work


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
