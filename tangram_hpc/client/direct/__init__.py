"""Calls of functions that go straight to a process on a node, past the broker.

The other side is `app/direct_server.py`, and the messages are in `protocol/direct_frames.py`.
"""
