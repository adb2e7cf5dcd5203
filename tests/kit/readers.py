"""The readers of Kafka, for tests of both."""

from __future__ import annotations

import pytest

from spouts.kafka.consumer.native_range_consumer import why_not_native

needs_native = pytest.mark.skipif(why_not_native() is not None, reason=f"no native reader: {why_not_native()}")
READERS = [pytest.param("native", marks=needs_native), "python"]
