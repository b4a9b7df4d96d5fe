"""The values that all other packages talk about: actions, sessions, nodes, events, decisions.

They are frozen `msgspec.Struct`s (docs/decisions/0001). Amounts and times are whole numbers; the
name of such a field ends with its unit. Nothing here does I/O, reads a clock or decides anything;
decisions are made in `scheduler/` and `libra/`.
"""
