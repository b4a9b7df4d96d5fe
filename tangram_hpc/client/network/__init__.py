"""Streams from a client to TCP ports of its sessions, local addresses that lead to such ports, and
the credit that bounds how many actions a client sends.

The package carries bytes and does not interpret them; the sandbox's side is `sandbox/network/`.
"""
