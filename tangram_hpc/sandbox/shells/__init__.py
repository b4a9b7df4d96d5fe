"""What a sandbox's init runs beyond single programs: shells that live on, and commands that run on
terminals.

It decides nothing about isolation and starts no init; `sandbox/process` calls it.
"""
