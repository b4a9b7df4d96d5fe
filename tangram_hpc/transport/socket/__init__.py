"""Authenticated Unix and TCP sockets: listeners, dialling, channels, and channels for large
messages.

No frame is read before both sides have proven that they hold the job's key. The address that other
nodes are told is chosen here. MPI is not imported.
"""
