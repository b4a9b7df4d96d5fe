"""Fillings of `ports.ServiceBackend`, and what keeps them on their GPUs."""
