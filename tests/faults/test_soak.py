"""Row 31: memory, threads, descriptors, znodes and files stay flat over many transactions."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import SERIES, Soak, plot, run
from tests.kit.fault_plugin import Faults


@pytest.mark.integration
@pytest.mark.kills
@pytest.mark.fault(31)
@pytest.mark.slow
def test_a_long_run_keeps_its_memory_and_other_resources_flat(tmp_path: Path, faults: Faults) -> None:
    """The run is long enough that the ring of a thousand records in
    ZooKeeper is full after its first quarter.
    """
    soak = run(4.0, tmp_path)
    print(f"{soak.transactions} transactions, {soak.records} records")
    assert soak.transactions > 4_000
    assert soak.problems() == []


def sampled(**last: float) -> Soak:
    flat = {"memory": 100.0, "threads": 20.0, "descriptors": 50.0, "znodes": 1000.0, "files": 5.0}
    samples = [{"seconds": float(number), "txid": float(number), **flat} for number in range(80)]
    for sample in samples[60:]:
        sample.update(last)
    return Soak(1.0, samples, 80, 80, exact=True)


@pytest.mark.parametrize("series", SERIES)
def test_a_series_that_grows_is_named_and_a_flat_one_is_not(series: str) -> None:
    assert sampled().problems() == []
    assert [problem.split()[0] for problem in sampled(**{series: 2_000.0}).problems()] == [series]
    assert Soak(1.0, sampled().samples, 80, 80, exact=False).problems() == ["the figures differ from the topic"]


def test_the_plot_shows_every_series(tmp_path: Path) -> None:
    plot(sampled(), tmp_path / "soak.svg")
    text = (tmp_path / "soak.svg").read_text()
    assert all(f">{series}" in text for series in (*SERIES, "txid"))
