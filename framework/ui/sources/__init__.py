"""The data sources of the page: runs of this process, and the coordination store."""
