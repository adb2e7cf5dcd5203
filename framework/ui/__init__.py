"""The status page: shows a run, or all topologies under a ZooKeeper root, in a browser.

This package serves, guards and renders the page. The data comes from a ``Source``: of a run, or of
the coordination store. Except for ``sources``, nothing here knows a topology, a store or a driver.
"""

from framework.ui.cached_reads import Kept
from framework.ui.documents import Source, View

__all__ = ["Kept", "Source", "View"]
