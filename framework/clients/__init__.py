"""Shared parts of the clients of other systems: settings, secrets, and the meaning of errors."""
