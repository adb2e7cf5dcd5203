"""librdkafka consumers whose ``close`` always returns.

librdkafka 2.16 has a deadlock: when a broker reports to a closing consumer that an offset is not in
the log, a thread of librdkafka waits for a lock that it already holds (``rd_kafka_offset_reset``
into a removed queue). Such a consumer is abandoned with its threads, and a warning is logged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import confluent_kafka

from framework.observe.logs import get_logger

#: How long a consumer may take to close: milliseconds without the deadlock.
CLOSE_MAX_S = 10.0

_log = get_logger()


class Consumer(confluent_kafka.Consumer):  # type: ignore[misc]  # it has no types
    """confluent-kafka's consumer, with a ``close`` that always returns."""

    def close(self) -> None:
        close_in_time(super().close)


def close_in_time(close: Callable[[], None]) -> bool:
    """Call a consumer's ``close``. Returns whether it ended within ``CLOSE_MAX_S``. Raises its
    error."""
    errors: list[BaseException] = []

    def closing() -> None:
        try:
            close()
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=closing, name="ratchet-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # an interpreter that is ending starts no threads
        close()
        return True
    thread.join(CLOSE_MAX_S)
    if errors:
        raise errors[0]
    if thread.is_alive():
        _log.warning("kafka.consumer_left", waited_s=CLOSE_MAX_S)
    return not thread.is_alive()
