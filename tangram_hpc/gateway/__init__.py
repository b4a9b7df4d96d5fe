"""The gateway rank: carries the trainers' bytes between MPI and the broker's sockets."""
