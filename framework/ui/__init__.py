"""The page: what a run, or everything under a ZooKeeper root, looks like in a browser.

This package serves, guards and draws. What there is to see comes from a ``Source``: of a run, or of
the coordination store. Nothing here knows a topology, a store or a driver.
"""

from framework.ui.cached_reads import Kept
from framework.ui.documents import Source, View

__all__ = ["Kept", "Source", "View"]
