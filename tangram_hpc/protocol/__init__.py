"""Bytes only: messages, frames, payloads, authentication, and when a silent peer counts as lost.

Client, broker, worker and gateway speak what is defined here; so do a worker and its sandboxes
(`process_frames.py`), and a worker and its service runners (`service_frames.py`). All functions are
pure functions of bytes and times. Sockets, MPI and pipes are in `transport/`.
"""
