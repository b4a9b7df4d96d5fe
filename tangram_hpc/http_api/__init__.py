"""What `tangram serve http` offers to programs that speak HTTP: SandboxFusion's `/run_code`,
reward URLs, and sandboxes by E2B's wire (`e2b`).

Every route is a thin translation into calls of the public `Client`: nothing is scheduled, executed
or stored here. The web framework is the extra `http`, and only these modules import it.
"""
