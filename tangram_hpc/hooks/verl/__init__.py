"""verl: a tool whose sandbox lives as long as its trajectory, and rewards that run as actions.

`sandbox_tool` and `reward_manager` have base classes of verl and are imported only by verl, by the
names in its configuration; `reward_functions` does not need verl. docs/trainers/VERL.md shows the
configuration.
"""
