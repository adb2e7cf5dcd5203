"""What a level sends arrives at the next one, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from framework.execution.level_walk import walk


def test_each_task_gets_what_was_sent_to_it_in_the_order_of_the_senders() -> None:
    arrived: list[tuple[int, Sequence[list[str]]]] = []

    def run_level(level: int, inboxes: Sequence[list[str]]) -> Iterator[tuple[int, str]]:
        arrived.append((level, [list(each) for each in inboxes]))
        for task, records in enumerate(inboxes):
            for record in records:
                yield (task + 1) % 2, f"{record}{level}"
                yield 0, f"{record}{level}!"

    left = walk([2, 3], run_level, {0: ["a"], 1: ["b"]})
    assert arrived == [(0, [["a"], ["b"]]), (1, [["a0!", "b0", "b0!"], ["a0"], []])]
    assert left == ["a0!1!", "b01!", "b0!1!", "a01", "a01!", "a0!1", "b01", "b0!1"]


def test_a_level_runs_even_if_nothing_was_sent_to_it() -> None:
    levels: list[int] = []

    def run_level(level: int, inboxes: Sequence[list[str]]) -> list[tuple[int, str]]:
        levels.append(level)
        assert list(inboxes) == [[], []]
        return []

    assert walk([2, 2, 2], run_level) == []
    assert levels == [0, 1, 2]
