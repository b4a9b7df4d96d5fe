"""The worker: one long-lived process on each held node."""
