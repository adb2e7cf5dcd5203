"""The entry of a partition in a plan."""

from __future__ import annotations

import json

from spouts.kafka.partition_plan_entries import Position, position_after, reaches


def test_an_epoch_moves_on_only_where_something_is_read() -> None:
    """Otherwise a log that was truncated and has grown again, while nothing of it was read,
    would pass for the same log.
    """
    read = Position(0, "id").meta(10, 3)
    assert read == {"first_offset": 0, "next_offset": 10, "topic_id": "id", "next_leader_epoch": 3}
    idle = position_after(read).meta(0, 5)
    assert (idle["first_leader_epoch"], idle["next_leader_epoch"]) == (3, 3)
    again = position_after(idle).meta(4, 5)
    assert (again["first_leader_epoch"], again["next_leader_epoch"]) == (3, 5)
    assert position_after(again).leader_epoch == 5


def test_skipped_totals_are_carried_to_the_next_plan_and_gaps_are_not() -> None:
    position = position_after({"first_offset": 0, "next_offset": 10, "topic_id": "id", "next_leader_epoch": 3})
    position.skip("retention", 17)
    plan = position.meta(3, 4)
    assert plan["gap"] == {"reason": "retention", "from_offset": 10, "to_offset": 17}
    assert (plan["first_offset"], plan["next_offset"], plan["lost_records"], plan["gaps"]) == (17, 20, 7, 1)
    assert "first_leader_epoch" not in plan  # nothing was read before where it begins now
    later = position_after(json.loads(json.dumps(plan))).meta(1, 4)
    assert "gap" not in later
    assert (later["lost_records"], later["gaps"]) == (7, 1)


def test_records_left_out_are_carried_until_another_log_takes_their_offsets() -> None:
    left_out = {"left_out": [4, 12], "left_out_from": 3}
    position = position_after({"first_offset": 0, "next_offset": 10, **left_out})
    assert position.meta(3, 4).items() >= left_out.items()
    position.skip("retention", 11)
    assert position.meta(3, 4).items() >= left_out.items()
    position.skip("another topic", 0)
    assert not position.meta(3, 4).keys() & left_out.keys()


def test_a_position_in_another_topic_reaches_nothing() -> None:
    ten = {"first_offset": 0, "next_offset": 10, "topic_id": "a"}
    assert reaches(ten, {"next_offset": 10, "topic_id": "a"})
    assert not reaches(ten, {"next_offset": 11, "topic_id": "a"})
    assert not reaches(ten, {"next_offset": 4, "topic_id": "b"})
    assert reaches({"next_offset": 10}, {"next_offset": 4, "topic_id": "b"})  # a plan of an earlier version has no id
