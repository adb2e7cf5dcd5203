"""Tuple trees: tracks which are complete, have failed or have timed out. Pure: no clock, no thread,
no I/O."""

from framework.acking.acker import Acker
from framework.acking.rotating_map import RotatingMap

__all__ = ["Acker", "RotatingMap"]
