"""Everything a person writes: settings, services, endpoints, allocations and rollout pools.

Each module checks what was written, names the field and the remedy when it is wrong, and returns
values of `domain/` or its own frozen models. Apart from the files of the simulators, this package
is the only door to pydantic, and it is the only one to TOML. It starts nothing and asks neither
Slurm nor a broker. It stands after `scheduler/` and `libra/` in the import order, because it checks
names and bounds that are defined there.
"""
