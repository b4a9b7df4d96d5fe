"""Answers to questions about a broker's state, as `tangram info` and `tangram explain` ask them.

The answers are plain values for JSON. Nothing here changes the state; tables for people are made in
`cli/`.
"""
