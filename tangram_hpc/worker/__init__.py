"""The worker's driver: one long-lived process on each held node.

The driver exchanges messages with the broker and hands orders to its executor port. It decides
nothing and starts no process itself; sandboxes are run in `sandbox/`, and model services in
`services/`.
"""
