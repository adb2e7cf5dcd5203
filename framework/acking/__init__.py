"""Tuple trees: which are complete, which have failed, which have timed out. Pure: no clock, no
thread, no I/O."""

from framework.acking.acker import Acker
from framework.acking.rotating_map import RotatingMap

__all__ = ["Acker", "RotatingMap"]
