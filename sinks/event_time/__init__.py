"""Committers that go by event time: the watermark, windows that are sent once, deduplication.

One ``WatermarkCommitter`` per topology keeps the clock. Its one task sends each transaction's
watermark to the tasks of the others, in the commit phase, by an ``all_grouping``. So everything
that happens because time has passed belongs to the transaction whose watermark passed it (C43,
C44).
"""
