"""What several verbs share: the ids that people write, and the lines about allocations.

No verb is defined here, and nothing here is printed.
"""
