"""What several verbs share: ids as people write them, and words about allocations.

No verb is defined here, and nothing here is printed.
"""
