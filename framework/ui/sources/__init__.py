"""Where the page gets what it shows: runs of this process, and the coordination store."""
