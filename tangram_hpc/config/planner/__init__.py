"""The files that a person writes for `libra/planner`, and the plan file that the planner writes.

Model files, hardware files, histories of lengths, measured steps, the table `[planner]` of the
configuration and the shipped examples are read and checked here. Nothing is planned here.
"""
