"""Runs the commands and functions of actions on a worker's node.

`manager/` is the worker's side, `process/` runs inside a sandbox, `isolation/` confines it, and
`files/` accesses its files safely. The modules here are what these packages share: the environment
of commands, and system calls by number. Limits of CPU and memory are in `resources/`.
"""
