"""The demo of ``ratchet run``: flights from New York, counted per carrier and per route."""
