"""Runs the commands and functions of actions on a worker's node.

`manager/` is the worker's side, `process/` and `shells/` run inside a sandbox, `isolation/`
confines it, `files/` accesses its files safely, and `network/` carries its traffic. The modules
here are what these packages share: the environment of commands, and system calls by number. Limits
of CPU and memory are in `resources/`.
"""
