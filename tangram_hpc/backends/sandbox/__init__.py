"""Rooms of the executor: a worker's hosts, the nursery that forks them, and what runs in them."""
