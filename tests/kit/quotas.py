"""Quotas of brokers, which confluent-kafka has no call for."""

from __future__ import annotations

import socket
import struct

#: AlterClientQuotas, in its first version.
_REQUEST, _VERSION = 49, 0


def limit_client(bootstrap_servers: str, client_id: str, key: str, value: float) -> None:
    """Give a client id a quota: ``key`` is "consumer_byte_rate" or "producer_byte_rate"."""
    entity = struct.pack(">i", 1) + _text("client-id") + _text(client_id)
    operation = struct.pack(">i", 1) + _text(key) + struct.pack(">d?", value, False)
    entry = struct.pack(">i", 1) + entity + operation
    body = struct.pack(">hhi", _REQUEST, _VERSION, 1) + _text("tests") + entry + b"\0"
    host, _, port = bootstrap_servers.split(",")[0].rpartition(":")
    with socket.create_connection((host, int(port)), 60) as link, link.makefile("rb") as answers:
        link.sendall(struct.pack(">i", len(body)) + body)
        (size,) = struct.unpack(">i", answers.read(4))
        answer = answers.read(size)
    (code,) = struct.unpack_from(">h", answer, 12)  # after correlation id, throttle time and number of entries
    assert code == 0, f"the broker refused the quota: error {code}"


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()
