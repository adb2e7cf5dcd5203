"""Reports the state of a run to systemd, for a service of type ``notify``.

Source: the protocol of ``sd_notify(3)``: datagrams to the socket that ``NOTIFY_SOCKET`` names.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

#: The longest interval between reports; for systemd's watchdog, half of the interval that it
#: requires.
_TELL_S = 1.0


class ServiceManager:
    """Does nothing without a service manager. Used by one thread."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._told_at, self._is_ready = 0.0, False
        with suppress(ValueError):
            asked_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6
            self._every_s = min(_TELL_S, asked_s / 2) if asked_s > 0 else _TELL_S

    _every_s = _TELL_S

    def tell(self, phase: str, *, ready: bool) -> None:
        """Report the phase of the run, and that its process works. ``ready``: the run leads or
        stands by; from then on, the service counts as started."""
        now = time.monotonic()
        starts = ready and not self._is_ready
        if not self._address or (now - self._told_at < self._every_s and not starts):
            return
        self._told_at, self._is_ready = now, self._is_ready or ready
        self._send("\n".join([*(["READY=1"] if starts else []), "WATCHDOG=1", f"STATUS={phase}"]))

    def stopping(self) -> None:
        """Report that the run is being stopped."""
        if self._address:
            self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(text.encode(), self._address)
