"""Code that the adapters of agent harnesses share: options and results of sessions, and carrying
out the steps of a task's Dockerfile in a session.

Nothing here depends on a particular harness; each harness has its own module in the folder above.
"""
