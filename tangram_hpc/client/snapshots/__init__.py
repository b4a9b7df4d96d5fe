"""Snapshots of sessions as a client sees them: listing, removing, and prepared environments.

A snapshot is taken by `Session.snapshot`. The workers keep the files; nothing here touches them.
"""
