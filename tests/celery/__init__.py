"""Tasks under a lock: with real workers and brokers, and without."""
