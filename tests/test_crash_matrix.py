"""A sample of the crash matrix: its most dangerous cases, and some that a fixed seed has drawn; `make crash-matrix` runs all."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from conftest import require_root
from crash_matrix import FAULTS, PARTS, Case, Matrix, matrix

pytestmark = pytest.mark.criu

DANGEROUS = (
    Case("capture", "dump", "kill"),
    Case("capture", "publish", "kill"),
    Case("capture", "publish", "enospc"),
    Case("capture", "freeze GPU", "hang"),
    Case("restore", "restore processes", "hang"),
    Case("restore", "restore processes", "killed"),
    Case("restore", "admit", "kill"),
)
"""A donor that is stopped, a snapshot half-published, GPU state half-off, a tree half-restored, a replica half-admitted."""
SEED, DRAWN = 5, 2


@pytest.fixture(scope="module")
def cells() -> Iterator[Matrix]:
    require_root()
    with matrix() as made:
        yield made


def test_restore_case_79_each_step_is_in_the_matrix_with_each_fault_that_it_can_have(cells: Matrix) -> None:
    """What the journal says a capture and a restore consist of: nobody can add a step that is left out."""
    assert len(cells.steps["capture"]) >= 20
    assert len(cells.steps["restore"]) >= 10
    cases = cells.cases()
    for flow, steps in cells.steps.items():
        for step in steps:
            assert {case.fault for case in cases if (case.flow, case.step) == (flow, step)} == (
                set(FAULTS) if step in PARTS else {"kill", "enospc"}
            )
    assert set(DANGEROUS) <= set(cases)


@pytest.mark.parametrize("case", DANGEROUS, ids=str)
def test_restore_case_79_the_most_dangerous_moments(cells: Matrix, case: Case) -> None:
    assert cells.run(case).faults == []


@pytest.mark.parametrize("number", range(DRAWN))
def test_restore_case_79_drawn_from_the_rest(cells: Matrix, number: int) -> None:
    rest = [case for case in cells.cases() if case not in DANGEROUS]
    case = random.Random(SEED).sample(rest, DRAWN)[number]
    assert cells.run(case).faults == [], str(case)
