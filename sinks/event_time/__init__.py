"""Committers that use event time: the watermark, windows that are sent once, deduplication.

One ``WatermarkCommitter`` per topology keeps the event time. Its single task sends each
transaction's watermark to the tasks of the others, in the commit phase, by an ``all_grouping``. So
every effect of passing time belongs to the transaction whose watermark passed that time (C43, C44).
"""
