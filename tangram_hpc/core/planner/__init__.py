"""The global planner: how many GPUs train and how many roll out, and in which layouts (Libra)."""
