"""What a person writes for the planner of `libra/planner`, and the plan file that it leaves.

Here are model files, hardware files, histories of lengths and measured steps, the table `[planner]`
of the configuration, and the shipped examples. Files are read, checked and written here; nothing is
planned here.
"""
