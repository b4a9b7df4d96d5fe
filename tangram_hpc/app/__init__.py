"""Which part fills which port: broker, worker and gateway put together, and `LocalCluster`.

This is the only package that knows both drivers and their real backends. It starts parts, joins
them and ends them in order. It adds no rules of its own, and `cli/` only calls it.
"""
