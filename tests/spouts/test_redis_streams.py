"""The Redis stream spout against a real server: what it emits, acknowledges and gets again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from framework import CoreTopologyFailed, Fields, TopologyBuilder, Tuple, submit
from framework.errors import ConfigError
from integration import RedisServer
from spouts import RetryPolicy
from spouts.redis_streams import RedisStreamSpout
from tests.kit.core_parts import Rich, Stepped, ack, hold, seen
from tests.kit.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.integration


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(redis_server.url) as connected:
        yield connected


@pytest.fixture
def stream() -> str:
    return f"s-{uuid.uuid4().hex[:10]}"


def stepped(url: str, stream: str, bolt: Any, *, tasks: int = 1, **options: Any) -> Stepped:
    builder = TopologyBuilder(stream)
    spout = RedisStreamSpout(stream, Fields(word=str, n=int), url=url, group="words", **options)
    builder.set_spout("stream", spout, tasks)
    builder.set_bolt("bolt", bolt).global_grouping("stream")
    return Stepped(builder.build())


def fill(client: Any, stream: str, count: int) -> None:
    for number in range(count):
        client.xadd(stream, {"word": f"w{number}", "n": number})


def give_to_another(client: Any, stream: str, count: int) -> None:
    """Let another consumer of the group read entries, and not acknowledge them."""
    fill(client, stream, count)
    client.xgroup_create(stream, "words", "0")
    client.xreadgroup("words", "somebody-else", {stream: ">"})


def pending(client: Any, stream: str) -> int:
    return int(client.xpending(stream, "words")["pending"])


def until(run: Stepped, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, run.driver.status()
        run.step()


def test_each_entry_goes_to_one_task_and_is_acknowledged_when_its_tree_is_complete(
    redis_server: RedisServer, client: Any, stream: str
) -> None:
    fill(client, stream, 40)
    run = stepped(redis_server.url, stream, Rich(stream, ack), tasks=3)
    until(run, lambda: run.driver.status().components["stream"].completed == 40)
    run.rounds.close()
    assert sorted(seen(stream).executed, key=lambda row: row[1]) == [(f"w{n}", n) for n in range(40)]
    assert pending(client, stream) == 0
    assert client.xlen(stream) == 40


def test_a_spout_that_redis_does_not_answer_has_not_caught_up(stream: str) -> None:
    run = stepped("redis://127.0.0.1:1/0", stream, Rich(stream, ack)).step(3)
    assert run.driver._idle is None


@pytest.mark.behaviour("4.6")
def test_a_task_that_opens_again_gets_its_pending_entries_again(
    redis_server: RedisServer, client: Any, stream: str
) -> None:
    fill(client, stream, 10)
    run = stepped(redis_server.url, stream, Rich(stream, hold))
    until(run, lambda: len(seen(stream).held) == 10)
    for collector, tup in seen(stream).held[:4]:
        collector.ack(tup)
    run.step(2)
    run.rounds.close()
    assert pending(client, stream) == 6
    again = stepped(redis_server.url, stream, Rich(f"{stream}2", ack), delete=True)
    until(again, lambda: again.driver.status().components["stream"].completed == 6)
    again.rounds.close()
    assert [n for _, n in seen(f"{stream}2").executed] == [4, 5, 6, 7, 8, 9]
    assert (pending(client, stream), client.xlen(stream)) == (0, 4)


def test_a_failing_entry_is_retried_up_to_the_limit_and_then_dropped(
    redis_server: RedisServer, client: Any, stream: str
) -> None:
    fill(client, stream, 3)

    def refuse_one(bolt: Any, tup: Tuple, collector: Any) -> None:
        (collector.fail if tup["n"] == 1 else collector.ack)(tup)

    run = stepped(redis_server.url, stream, Rich(stream, refuse_one), retry=RetryPolicy(retries_max=2))
    until(run, lambda: len(seen(stream).executed) == 5 and run.driver.status().pending == 0)
    run.rounds.close()
    assert sorted(n for _, n in seen(stream).executed) == [0, 1, 1, 1, 2]
    assert "entry" in str(run.driver.status().last_error)
    assert pending(client, stream) == 0


def test_a_topology_is_not_idle_while_a_failed_entry_waits_for_its_next_try(
    redis_server: RedisServer, client: Any, stream: str
) -> None:
    fill(client, stream, 2)

    def third_time(bolt: Any, tup: Tuple, collector: Any) -> None:
        tries = seen(bolt.key).executed.count(tup.values)
        (collector.fail if tup["n"] == 1 and tries < 3 else collector.ack)(tup)

    builder = TopologyBuilder(stream)
    spout = RedisStreamSpout(
        stream, Fields(word=str, n=int), url=redis_server.url, group="words", retry=RetryPolicy(delay_s=1.0)
    )
    builder.set_spout("stream", spout)
    builder.set_bolt("bolt", Rich(stream, third_time)).global_grouping("stream")
    with submit(builder.build(), {}, executor="local") as run:
        run.wait_until_idle(PATIENCE_S)
        assert sorted(n for _, n in seen(stream).executed) == [0, 1, 1, 1]
    assert pending(client, stream) == 0


def test_pending_entries_of_another_task_are_taken_over(
    redis_server: RedisServer, client: Any, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.redis_streams._TAKE_OVER_EVERY_S", 0.05)
    give_to_another(client, stream, 5)
    run = stepped(redis_server.url, stream, Rich(stream, ack), take_over_after_s=0.2)
    until(run, lambda: run.driver.status().components["stream"].completed == 5)
    run.rounds.close()
    assert pending(client, stream) == 0


def test_entries_that_always_fail_stop_a_task_from_reading_more(
    redis_server: RedisServer, client: Any, stream: str
) -> None:
    fill(client, stream, 300)

    def refuse(bolt: Any, tup: Tuple, collector: Any) -> None:
        collector.fail(tup)

    retry = RetryPolicy(delay_s=3_600, delay_max_s=3_600)
    run = stepped(redis_server.url, stream, Rich(stream, refuse), retry=retry, unacknowledged_max=100)
    until(run, lambda: len(seen(stream).executed) >= 200)  # each entry twice: the first retry comes at once
    run.step(5)
    run.rounds.close()
    assert len(set(seen(stream).executed)) == 100
    assert pending(client, stream) == 100


@pytest.mark.parametrize("command", ["xreadgroup", "xautoclaim"])
def test_entries_of_a_lost_answer_are_still_emitted(
    redis_server: RedisServer, client: Any, stream: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("spouts.redis_streams._TAKE_OVER_EVERY_S", 0.0)
    fill(client, stream, 5)
    if command == "xautoclaim":
        client.xgroup_create(stream, "words", "0")
        client.xreadgroup("words", "somebody-else", {stream: ">"})
    real = getattr(redis.Redis, command)
    lost: list[Any] = []

    def losing(self: Any, *arguments: Any, **more: Any) -> Any:
        if command == "xautoclaim" and not lost:
            arguments = (*arguments[:3], 0, *arguments[4:])  # as if the entry had been idle for long enough
        answer = real(self, *arguments, **more)
        if str(answer).count("word") == 5 and not lost:
            lost.append(answer)
            raise redis.ConnectionError("the answer was lost")
        return answer

    monkeypatch.setattr(redis.Redis, command, losing)
    run = stepped(redis_server.url, stream, Rich(stream, ack))
    until(run, lambda: run.driver.status().components["stream"].completed == 5)
    run.rounds.close()
    assert lost
    assert sorted(n for _, n in seen(stream).executed) == list(range(5))
    assert pending(client, stream) == 0


def test_entries_of_a_task_that_is_gone_are_taken_over_while_new_ones_come(
    redis_server: RedisServer, client: Any, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.redis_streams._TAKE_OVER_EVERY_S", 0.0)
    give_to_another(client, stream, 3)
    spout = RedisStreamSpout(
        stream, Fields(word=str, n=int), url=redis_server.url, group="words", take_over_after_s=0.001
    )
    emitted: list[Any] = []
    collector = SimpleNamespace(emit=lambda values, **more: emitted.append(values), report_error=print)
    spout.open({}, SimpleNamespace(topology_id="t", component_id="c", task_index=0), collector)  # type: ignore[arg-type]
    for _ in range(20):
        client.xadd(stream, {"word": "new", "n": 1_000})
        spout.next_tuple()
    spout.close()
    assert [n for _, n in emitted if n < 1_000] == [0, 1, 2]


@pytest.mark.slow
def test_entries_of_a_task_that_lives_are_not_taken_over_however_long_they_take(
    redis_server: RedisServer, client: Any, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while nobody asks the task for more, because enough is pending."""
    monkeypatch.setattr("spouts.redis_streams._TAKE_OVER_EVERY_S", 0.0)
    fill(client, stream, 3)
    emitted: list[tuple[int, Any]] = []

    def opened(task: int) -> RedisStreamSpout:
        spout = RedisStreamSpout(
            stream, Fields(word=str, n=int), url=redis_server.url, group="words", take_over_after_s=8
        )
        collector = SimpleNamespace(
            emit=lambda values, message_id, stream: emitted.append((task, message_id)), report_error=print
        )
        context = SimpleNamespace(topology_id="t", component_id="c", task_index=task)
        spout.open({}, context, collector)  # type: ignore[arg-type]
        return spout

    slow = opened(0)
    slow.next_tuple()  # it emits one entry, and keeps two for later
    everything = client.xpending_range(stream, "words", "-", "+", 10)
    assert len(everything) == 3
    ids = [each["message_id"] for each in everything]
    client.xclaim(stream, "words", everything[0]["consumer"], 0, ids, idle=3_600_000, justid=True)  # an hour goes by
    wait_for(lambda: not client.xpending_range(stream, "words", "-", "+", 10, idle=600_000))
    other = opened(1)
    for _ in range(5):
        other.next_tuple()
    assert [task for task, _ in emitted] == [0]
    slow.ack(emitted[0][1])
    slow.close()
    client.xclaim(stream, "words", everything[0]["consumer"], 0, ids[1:], idle=3_600_000, justid=True)
    wait_for(lambda: other.next_tuple() or len(emitted) == 3)  # type: ignore[func-returns-value]
    other.close()
    assert [task for task, _ in emitted] == [0, 1, 1]


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_group_that_is_destroyed_is_lost_data(
    redis_server: RedisServer, client: Any, stream: str, start: str
) -> None:
    client.xgroup_create(stream, "words", "0", mkstream=True)
    fill(client, stream, 1)
    builder = TopologyBuilder(stream)
    spout = RedisStreamSpout(stream, Fields(word=str, n=int), url=redis_server.url, group="words", start=start)
    builder.set_spout("stream", spout)
    builder.set_bolt("bolt", Rich(stream, ack)).global_grouping("stream")
    run = submit(builder.build(), {}, executor="local")
    run.wait_until_idle(PATIENCE_S)
    client.xgroup_destroy(stream, "words")
    fill(client, stream, 1)
    with pytest.raises(CoreTopologyFailed, match=f"stream '{stream}' has no group 'words' any more"):
        run.join(PATIENCE_S)


BAD_ENTRIES = [
    ({"word": "x"}, "field 'n' is not there"),
    ({"word": "x", "n": "seven"}, "field 'n' is no int64: b'seven'"),
    ({"word": "x", "n": "9" * 30}, f"field 'n' is no int64: b'{'9' * 30}'"),
    ({"word": "x", "n": "9" * 100_000}, "field 'n' is no int64: b'999"),
    ({"word": b"\xff", "n": 1}, r"field 'word' is no string: b'\xff'"),
]


@pytest.mark.parametrize(("entry", "message"), BAD_ENTRIES)
def test_an_entry_that_does_not_match_the_declared_fields_is_named(
    redis_server: RedisServer, client: Any, stream: str, entry: dict[str, Any], message: str
) -> None:
    number = client.xadd(stream, entry).decode()
    builder = TopologyBuilder("wrong")
    builder.set_spout("stream", RedisStreamSpout(stream, Fields(word=str, n=int), url=redis_server.url, group="words"))
    run = submit(builder.build(), {}, executor="local")
    with pytest.raises(CoreTopologyFailed, match=f"stream '{stream}', entry {number}: ") as failed:
        run.join(PATIENCE_S)
    assert message in str(failed.value)


def test_skipped_entries_are_reported_and_acknowledged(redis_server: RedisServer, client: Any, stream: str) -> None:
    for entry, _ in BAD_ENTRIES:
        client.xadd(stream, entry)
    fill(client, stream, 3)
    run = stepped(redis_server.url, stream, Rich(stream, ack), on_bad_record="skip", delete=True)
    until(run, lambda: run.driver.status().components["stream"].completed == 3)
    assert "entry" in str(run.driver.status().last_error)
    run.rounds.close()
    assert sorted(n for _, n in seen(stream).executed) == [0, 1, 2]
    assert (pending(client, stream), client.xlen(stream)) == (0, 0)


def test_dead_letters_contain_the_fields_and_are_retried_until_a_bolt_takes_them(
    redis_server: RedisServer, client: Any, stream: str
) -> None:
    letters = f"{stream}-letters"

    def third_time(bolt: Any, tup: Tuple, collector: Any) -> None:
        (collector.ack if seen(letters).executed.count(tup.values) == 3 else collector.fail)(tup)

    number = client.xadd(stream, {"word": b"\xff", "more": b"\x00"}).decode()
    fill(client, stream, 2)
    builder = TopologyBuilder(stream)
    spout = RedisStreamSpout(
        stream,
        Fields(word=str, n=int),
        url=redis_server.url,
        group="words",
        on_bad_record="dead_letter",
        retry=RetryPolicy(retries_max=0),
    )
    builder.set_spout("stream", spout)
    builder.set_bolt("bolt", Rich(stream, ack)).global_grouping("stream")
    builder.set_bolt("letters", Rich(letters, third_time)).global_grouping("stream", "dead_letters")
    run = Stepped(builder.build())
    until(run, lambda: run.driver.status().components["stream"].completed == 3)
    run.rounds.close()
    fields = [{"key": b"word", "value": b"\xff"}, {"key": b"more", "value": b"\x00"}]
    reason = f"stream '{stream}', entry {number}: field 'word' is no string: b'\\xff'"
    assert seen(letters).executed == [(stream, number, reason, fields)] * 3
    assert sorted(n for _, n in seen(stream).executed) == [0, 1]
    assert pending(client, stream) == 0


def test_a_task_requests_and_holds_few_large_entries(
    redis_server: RedisServer, client: Any, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spouts.redis_streams.CHUNK_BYTES", 40_000)
    monkeypatch.setattr("spouts.redis_streams.UNACKNOWLEDGED_BYTES_MAX", 100_000)
    answers: list[int] = []
    real = RedisStreamSpout._entries

    def counted(self: RedisStreamSpout, after: bytes, most: int) -> Any:
        found = real(self, after, most)
        answers.append(len(found))
        return found

    monkeypatch.setattr(RedisStreamSpout, "_entries", counted)
    for number in range(100):
        client.xadd(stream, {"word": "x" * 10_000, "n": number})
    run = stepped(redis_server.url, stream, Rich(stream, hold))
    run.step(60)
    sizes = [each for each in answers if each]
    assert sizes[0] == 16
    assert set(sizes[1:]) <= {3, 4}
    assert len(seen(stream).held) == sum(sizes) <= 16
    while len(seen(stream).executed) < 100:
        for collector, tup in seen(stream).held:
            collector.ack(tup)
        seen(stream).held.clear()
        run.step(3)
    run.rounds.close()
    assert sorted(n for _, n in seen(stream).executed) == list(range(100))


def test_impossible_redis_spout_settings_are_refused_by_name() -> None:
    made = {"url": "redis://127.0.0.1", "group": "g"}
    with pytest.raises(ConfigError, match="start must be 'earliest' or 'latest', not 'now'"):
        RedisStreamSpout("s", Fields(a=str), start="now", **made)
    with pytest.raises(ConfigError, match="take_over_after_s must be above 0"):
        RedisStreamSpout("s", Fields(a=str), take_over_after_s=0, **made)
    with pytest.raises(ConfigError, match="unacknowledged_max must be 1 or more"):
        RedisStreamSpout("s", Fields(a=str), unacknowledged_max=0, **made)
    with pytest.raises(ConfigError, match="field 'a' of a Redis stream must be str, int, float or bytes"):
        RedisStreamSpout("s", Fields("a"), **made)


def test_no_part_of_a_password_is_taken_for_a_port_and_shown() -> None:
    spout = RedisStreamSpout("s", Fields(word=str), url="redis://:s3cr/et@host:6379/0", group="g")
    with pytest.raises(ConfigError, match="does not parse: .* %2F for /") as refused:
        spout.open({}, SimpleNamespace(topology_id="t", component_id="c", task_index=0), None)  # type: ignore[arg-type]
    assert "s3cr" not in str(refused.value)
