"""The language on top: pipelines, streams and tables that compile to transactional topologies."""

from framework.streams.pipeline import Pipeline
from framework.streams.ports import Reading, Source, Target
from framework.streams.stream import Stream
from framework.streams.table import Grouped, Table

__all__ = ["Grouped", "Pipeline", "Reading", "Source", "Stream", "Table", "Target"]
