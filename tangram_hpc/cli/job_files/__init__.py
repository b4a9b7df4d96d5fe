"""Holds verbs that read and mend the files of a job's folder, without its broker.

Nothing here knows how these files are made; `storage` does.
"""
