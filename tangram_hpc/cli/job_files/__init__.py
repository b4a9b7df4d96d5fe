"""Holds verbs that read, mend and remove the files of jobs, without their brokers.

Nothing here knows how these files are made; `storage` does.
"""
