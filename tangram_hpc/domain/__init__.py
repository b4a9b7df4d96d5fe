"""Values only: what the parts of tangram_hpc talk about. No I/O, no clock, no decisions.

Records are `msgspec.Struct`s (docs/decisions/0001): frozen, integers for amounts and times,
units last in every name.
"""
