"""Steps: ``perform`` runs them, and raises their errors inside the generator."""

from __future__ import annotations

from functools import partial

import pytest

from framework.coordination.step_generators import Steps, Threads, perform
from framework.errors import RetryableError
from tests.kit.waiting import PATIENCE_S


def halves(numbers: list[int]) -> Steps[list[int]]:
    """Half of each number; -1 for odd ones."""
    found = []
    for number in numbers:
        try:
            found.append((yield partial(_half, number)))
        except RetryableError:
            found.append(-1)
    return found


def _half(number: int) -> int:
    if number % 2:
        raise RetryableError(f"{number} is odd")
    return number // 2


def test_the_result_or_the_error_of_a_step_comes_back_at_its_yield() -> None:
    assert perform(halves([4, 3, 8])) == [2, -1, 4]


def test_perform_raises_an_uncaught_error_and_closes_the_generator() -> None:
    released: list[str] = []

    def steps() -> Steps[None]:
        try:
            yield partial(_interrupt)
        finally:
            released.append("released")

    with pytest.raises(KeyboardInterrupt):
        perform(steps())
    assert released == ["released"]


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_spawned_thread_performs_its_steps() -> None:
    threads = Threads()
    messages = threads.queue()

    def steps() -> Steps[None]:
        yield partial(messages.put, "done")

    thread = threads.spawn("steps", steps())
    assert messages.get(timeout=PATIENCE_S) == "done"
    thread.join(PATIENCE_S)
    assert thread.name == "ratchet-steps"
