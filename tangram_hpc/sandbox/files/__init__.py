"""Accesses a sandbox's files from outside, without following what could lead out of them.

Here are confined access, modes and owners, scratch directories, and archives of a session's files.
Visible paths and mounts are in `sandbox/isolation`.
"""
