"""How a partition of a topic is named in plans: ``orders/3``."""

from __future__ import annotations


def partition_id(topic: str, number: int) -> str:
    """
    >>> partition_id("orders", 3)
    'orders/3'
    """
    return f"{topic}/{number}"


def topic_and_number(partition: str) -> tuple[str, int]:
    """The reverse: a topic's name holds no slash.

    >>> topic_and_number("orders/3")
    ('orders', 3)
    """
    topic, _, number = partition.rpartition("/")
    return topic, int(number)
