"""Holds the process of a job's broker: how it is put together, begins, is watched and ends.

How others find a broker, and how a dead one is started again, stands beside this folder.
"""
