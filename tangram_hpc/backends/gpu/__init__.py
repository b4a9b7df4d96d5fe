"""What GPUs a node has, by one door."""
