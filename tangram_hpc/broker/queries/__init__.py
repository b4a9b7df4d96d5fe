"""Answers queries about a broker's state, as `tangram info` and `tangram explain` send them.

A reply is made of plain values for JSON. Nothing here changes the state; `cli/` makes tables of it.
"""
