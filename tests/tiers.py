"""Which tests belong to which tier: by a mark, as a case of many, or by the time that they take.

    pytest -n 2 --dist loadfile -m "not slow" --junitxml report.xml && python tests/tiers.py report.xml

writes long.txt anew, from a run of both tiers on two quiet cores.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest


def tiered(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrized test, of which all but the quick ones are for `make test-system`."""
    given = list(cases)
    assert set(quick) <= set(given), "a quick case is none of the cases"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id="-".join(map(str, case)) if isinstance(case, tuple) else str(case),
            marks=() if case in quick else pytest.mark.system,
        )
        for case in given
    ]


HEART = frozenset(
    {"fedavg", "fedalt", "fedslr", "quped", "fedbcd", "fedbcdi", "ditto", "scaffold"}
)  # every method, for quick cases
LONG = Path(__file__).with_name("long.txt")
SECONDS = 0.6  # from which on a test is for the second tier
ESSENTIAL = (  # but these, for whoever breaks one should know at once
    r"test_laws\.py::test_laws\[(fedavg|fedalt|fedslr|quped|fedbcd|ditto|scaffold)-",
    r"test_docs.*README",
    r"test_device_imports",
    r"test_devices_give_the_simulators_bits\[(fedalt|fedslr)\]",
    r"test_a_cloud_in_one_process_gives_the_simulators_bits\[async\]",
    r"test_a_method_that_keeps_the_laws_runs_everywhere",
    r"test_from_a_table_to_named",
    r"test_every_method_resumes_after_every_round\[(fedalt|fedslr)",
    r"test_every_method_trains_as_the_plain_loop_does\[(fedalt|fedslr|quped|fedbcd)",
    r"test_iterates_reach_the_solution_of_a_convex_solver",
    r"test_neither_data_nor_personal_parameters_leave_a_device\[fedalt",
    r"test_a_comparison_stopped_between",
    r"test_what_is_loaded_is_what_the_run_has.*fedslr.*cnn",
    r"test_a_device_that_is_cut_off_for_six_rounds.*settled",
    r"test_devices_of_a_server_that_is_out.*sync-fedbcd-handed",
    r"test_what_a_client_keeps_has_no_noise",
    r"test_a_server_and_its_devices_wait_for_space",
    r"test_no_damage_is_silent\[server",
    r"test_it_reaches_the_optimum_where_fedavg_stalls",
    r"test_nodes_give_the_simulators_bits",
    r"test_two_comparisons_are_side_by_side",
)


def long_tests() -> frozenset[str]:
    """Return the tests that are for `make test-system` by the time they take, by their names in pytest."""
    return frozenset(LONG.read_text().splitlines())


def found_long(junit: str) -> Iterator[str]:
    """Yield the tests of a report by pytest's --junitxml that took long, and are not essential."""
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        parts, name = case.attrib["classname"].split("."), case.attrib["name"]
        size = next(size for size in range(len(parts), 0, -1) if Path(*parts[:size]).with_suffix(".py").exists())
        test = "::".join([str(Path(*parts[:size]).with_suffix(".py")), *parts[size:], name])
        if float(case.attrib["time"]) >= SECONDS and not any(re.search(each, test) for each in ESSENTIAL):
            yield test


if __name__ == "__main__":
    LONG.write_text("\n".join(sorted(set(found_long(sys.argv[1])))) + "\n")
