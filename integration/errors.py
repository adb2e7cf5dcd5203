"""The errors around servers. Each message is one line."""

from __future__ import annotations


class ServerError(Exception):
    """A server cannot be fetched, started or reached. The message gives the reason and the
    remedy."""


class KilledError(ServerError):
    """A signal ended a program of a server. The message names the signal and the last line of the
    program."""


class NotOursError(ServerError):
    """The servers are external: Ratchet cannot start, stop or kill them."""
