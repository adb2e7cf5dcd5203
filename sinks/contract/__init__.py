"""The test suite that every backend must pass: subclass ``BackendContract`` and write ``make``."""

from sinks.contract.backend import BackendContract

__all__ = ["BackendContract"]
