"""Streams from a client to TCP ports of its sessions, and local addresses that lead to such ports.

The package carries bytes and does not interpret them; the sandbox's side is `sandbox/network/`.
"""
