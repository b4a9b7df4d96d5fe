"""Streams from a client to TCP ports of its sessions, local addresses that lead to such ports, and
the credit that bounds how many actions a client sends.

The streams carry bytes and do not interpret them; the sandbox's side is `sandbox/network/`. The
credit decides which actions wait at the client, and sends nothing itself.
"""
