"""Everything a person writes: settings, services, endpoints, allocations and rollout pools.

Each module checks what was written. If it is wrong, the error names the field and the remedy. If it
is right, the result is a value of `domain/` or a frozen model of this package. Apart from the
simulators' files, this package is the only one that imports pydantic, and the only one that reads
TOML. It starts nothing and asks neither Slurm nor a broker. In the order of imports it comes after
`scheduler/` and `libra/`, because it checks names and bounds that are defined there.
"""
