"""The word count of ``benchmarks.core`` in other systems."""
