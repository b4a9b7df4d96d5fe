"""Holds verbs that show what a job did or does: its records, resources, queue and reports.

They read, and change nothing. What the figures mean is decided in `accounting` and in the broker.
"""
