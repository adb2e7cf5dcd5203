"""The size of a batch (2.4): exact in records, approximate in bytes and seconds,
fair to partitions.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import BadRecordError, ConfigError
from spouts.codecs.bad_records import WINDOW_RECORDS, BadRecordShare
from spouts.kafka.planning.batch_limits import (
    FIRST_BATCH_RECORDS,
    FIRST_SIZED_BATCH_RECORDS,
    GROWTH_MAX,
    TASK_ROWS_BYTES_MAX,
    BatchSizer,
    KafkaLimits,
    fair_shares,
)

pytestmark = pytest.mark.behaviour("2.4")


@given(st.dictionaries(st.text("abcdef", min_size=1), st.integers(0, 1000)), st.integers(1, 500), st.integers(1, 300))
def test_shares_of_partitions_are_fair_and_within_limits(available: dict[str, int], batch: int, each: int) -> None:
    shares = fair_shares(available, KafkaLimits(batch, each))
    assert shares.keys() == available.keys()
    assert sum(shares.values()) == min(batch, sum(min(held, each) for held in available.values()))
    for partition, share in shares.items():
        assert 0 <= share <= min(available[partition], each)
        # A partition that is cut short gets at least as much as any other, give or take one.
        if share < min(available[partition], each):
            assert share >= max(shares.values()) - 1


@given(st.integers(2, 30), st.integers(1, 29), st.integers(0, 10**12))
def test_with_more_partitions_than_records_every_partition_has_its_turn(
    partitions: int, batch: int, begin: int
) -> None:
    """When all partitions always have records, each has been served equally
    often after one round, give or take one.
    """
    batch = min(batch, partitions - 1)
    available = {f"t/{number}": 5 for number in range(partitions)}
    served = dict.fromkeys(available, 0)
    turn = begin
    for _ in range(partitions):
        for partition, share in fair_shares(available, KafkaLimits(batch), turn).items():
            served[partition] += share
            turn += share
    assert max(served.values()) - min(served.values()) <= 1


def test_a_limit_of_time_starts_small_grows_in_steps_and_keeps_to_the_time() -> None:
    sizer = BatchSizer(KafkaLimits(100_000_000, batch_time_max_s=10.0))
    assert sizer.limits().batch_records_max == FIRST_BATCH_RECORDS
    sizer.learn(FIRST_BATCH_RECORDS, FIRST_BATCH_RECORDS, 10**7, 0.1)  # a million a second
    assert sizer.limits().batch_records_max == GROWTH_MAX * FIRST_BATCH_RECORDS
    sizer.learn(GROWTH_MAX * FIRST_BATCH_RECORDS, 1, 1, 0.8)
    assert sizer.limits().batch_records_max == 10_000_000 * 64 // 100  # eight times the largest one so far
    sizer.learn(6_400_000, 6_400_000, 10**9, 64.0)  # much too slow: this counts at once
    assert sizer.limits().batch_records_max == pytest.approx(1_000_000, rel=1e-3)


def test_a_job_that_is_slow_whatever_its_size_does_not_shrink_its_batches_to_nothing() -> None:
    """A broker that stops, or a machine that is busy: fewer records would not be quicker, and
    batches of one record would never catch up.
    """
    sizer = BatchSizer(KafkaLimits(500_000, batch_time_max_s=10.0))
    sizes = []
    for number in range(60):
        planned = min(sizer.limits().batch_records_max, 2_000)
        sizes.append(planned)
        sizer.learn(planned, planned, planned * 100, 12.0 + 9.0 * (number % 3) + planned * 0.000_1)
    assert min(sizes) >= 200
    for _ in range(10):  # the job is quick again
        planned = sizer.limits().batch_records_max
        sizer.learn(planned, planned, planned * 100, 1.0 + planned * 0.000_1)
    assert sizer.limits().batch_records_max >= 50_000


@given(st.floats(0.000_01, 5.0), st.floats(0.0, 8.0))
def test_slow_records_shrink_their_batches_until_they_fit(each_s: float, job_s: float) -> None:
    sizer = BatchSizer(KafkaLimits(500_000, batch_time_max_s=10.0))
    for _ in range(30):
        planned = sizer.limits().batch_records_max
        sizer.learn(planned, planned, planned * 100, job_s + planned * each_s)
    planned = sizer.limits().batch_records_max
    assert planned == 1 or job_s + planned * each_s <= 10.5
    assert planned >= min(0.5 * (10.0 - job_s) / each_s - 1, 500_000)


def test_small_batches_do_not_teach_the_limit_of_time() -> None:
    sizer = BatchSizer(KafkaLimits(500_000, batch_time_max_s=10.0))
    for _ in range(100):
        sizer.learn(10, 10, 1_000, 0.05)  # two hundred a second: a trickle
    assert sizer.limits().batch_records_max == FIRST_BATCH_RECORDS


def test_a_limit_of_bytes_follows_the_size_of_records() -> None:
    sizer = BatchSizer(KafkaLimits(500_000, batch_bytes_max=10_000_000))
    assert sizer.limits().batch_records_max == FIRST_SIZED_BATCH_RECORDS
    sizer.learn(1_000, 1_000, 1_000_000, 0.1)
    assert sizer.limits().batch_records_max == 10_000
    for _ in range(40):  # records become ten times larger
        sizer.learn(10_000, 10_000, 100_000_000, 0.1)
    assert 1_000 <= sizer.limits().batch_records_max <= 1_010
    sizer.learn(0, 0, 0, 0.0)
    huge = BatchSizer(KafkaLimits(10, batch_bytes_max=1))
    huge.learn(1, 1, 10_000_000, 0.1)
    assert huge.limits().batch_records_max == 1  # never 0: a record that is larger than the limit is a batch of its own


def test_the_rows_of_a_task_bound_a_batch_whatever_its_values_have() -> None:
    sizer = BatchSizer(KafkaLimits(500_000))
    for _ in range(9):  # 180 bytes a record, far below the bound
        sizer.learn(500_000, 500_000, 100_000_000, 1.0, row_bytes=90_000_000)
    assert sizer.limits().batch_records_max == 500_000
    sizer.learn(100, 100, 90_000_000, 1.0, row_bytes=90_000_000)  # records become large: this counts at once
    assert 100 <= sizer.limits().batch_records_max <= TASK_ROWS_BYTES_MAX // 900_000
    sizes = []
    for _ in range(30):
        sizes.append(sizer.limits().batch_records_max)
        sizer.learn(sizes[-1], sizes[-1], sizes[-1] * 200, 1.0, row_bytes=sizes[-1] * 180)
    assert sizes == sorted(sizes) and sizes[-1] == 500_000


@given(st.lists(st.tuples(st.integers(0, 3_000), st.floats(0, 1)), max_size=60), st.floats(0, 1))
def test_the_share_of_bad_records_is_that_of_the_latest_batches(batches: list[tuple[int, float]], limit: float) -> None:
    share = BadRecordShare(limit)
    seen: list[tuple[int, int]] = []
    for records, part in batches:
        bad = int(records * part)
        if records:
            seen.append((records, bad))
        window: list[tuple[int, int]] = []
        for batch in reversed(seen):
            window.append(batch)
            if sum(each for each, _ in window) >= WINDOW_RECORDS:
                break
        total, wrong = (sum(column) for column in zip(*window, strict=True)) if window else (0, 0)
        if records and wrong > limit * max(total, WINDOW_RECORDS):
            with pytest.raises(BadRecordError, match=f"{wrong:,} of the last {total:,} records"):
                share.check(records, bad)
            return
        share.check(records, bad)


@pytest.mark.parametrize("limit", [-0.1, 1.1, "half", True])
def test_a_share_outside_0_to_1_is_refused(limit: object) -> None:
    with pytest.raises(ConfigError, match="bad_record_share_max must be between 0 and 1"):
        BadRecordShare(limit)  # type: ignore[arg-type]
