"""The suite that every backend passes: subclass ``BackendContract`` and write ``make``."""

from sinks.contract.backend import BackendContract

__all__ = ["BackendContract"]
