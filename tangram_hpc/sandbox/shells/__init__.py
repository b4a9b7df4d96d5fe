"""What a sandbox's init runs beyond single programs: shells that live on, commands that run on
terminals, and commands that can go to the background.

It decides nothing about isolation and starts no init; `sandbox/process` calls it.
"""
