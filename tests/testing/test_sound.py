"""Nothing is found in topologies without a mistake, over many seeds."""

from __future__ import annotations

import pytest

from framework.testing import simulate
from framework.testing.simulation.schedule import Kind
from tests.kit.targets import Often
from tests.testing.mistakes import RECORDS
from tests.testing.sound import SOUND, numbered


@pytest.mark.quick_for("one task")
@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_topology(name: str, often: Often) -> None:
    seed = 1_000 * list(SOUND).index(name)
    schedules = often(3, 30)
    report = simulate(SOUND[name](), RECORDS, schedules=schedules, seed=seed)
    assert report.schedules == schedules
    assert report.notes == []
    assert report.left_out == {}


@pytest.mark.slow
def test_every_kind_of_trouble_strikes() -> None:
    report = simulate(SOUND["opaque"](), RECORDS, schedules=60)
    assert set(report.met) == {kind.name.lower() for kind in Kind}


@pytest.mark.slow
def test_the_sample_comes_from_the_source_of_a_general_spout() -> None:
    report = simulate(numbered(), 12, schedules=5)
    assert report.records == 12
