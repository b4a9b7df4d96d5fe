"""Ways for frames to travel: sockets (everybody), MPI (clients, through a gateway rank)."""
