"""Tools that read what a topology recorded: verify, explain, replay, rebuild, and others."""
