"""What goes wrong around the servers, as one line each."""

from __future__ import annotations


class ServerError(Exception):
    """A server cannot be fetched, started or reached; the message says why and what to do."""


class NotOursError(ServerError):
    """A server was to be started, stopped or killed that somebody else runs."""
