"""A job's files: its folder, access file, journal, spool, payload store and learned trees.

Only its owner may read any of the files, and each module says what survives a crash. Checks of
which job a folder belongs to and which broker holds it are here as well. What the events in the
journal mean is defined in `domain/`.
"""
