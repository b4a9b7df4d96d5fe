"""Authenticated Unix and TCP sockets: listeners, dialling, channels, and channels for large
messages.

No frame is read before the mutual challenge has passed. The address that others are told is chosen
here. MPI is not imported.
"""
