"""A job's files: its folder, access file, journal, spool, payload store and learned trees.

Every file is owner-only, and each module says what survives a crash. Whose folder it is and which
broker holds it is found out here as well. What the events in the journal mean is defined in
`domain/` and read by `accounting/`.
"""
