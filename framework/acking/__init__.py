"""Tuple trees: which of them are whole, which have failed, which have taken too long. Pure: no clock, no thread, no I/O."""

from framework.acking.acker import Acker
from framework.acking.rotating_map import RotatingMap

__all__ = ["Acker", "RotatingMap"]
