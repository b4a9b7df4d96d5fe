"""The simulator: the real scheduler under a jumping clock, with modelled machines."""
