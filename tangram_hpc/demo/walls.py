"""Owns: which isolation the demo asks for its programs, and what it says where there is none."""

from __future__ import annotations

from typing import Any

from ..sandbox.manager.backends import Backends


def isolation_options(client: Any) -> dict[str, Any]:
    """Session options for the demo's programs. `process` starts fastest, and hundreds of sandboxes
    open at once; otherwise the nodes' best backend. If no backend can hold untrusted code, the
    programs run as trusted, since they ship with this package. A model's code must not."""
    works = {name for node in client.ask("nodes")["nodes"] for name in node["untrusted"]}
    return {"backend": "process" if "process" in works else "", "trusted": not works}


def unguarded() -> str:
    """A line for people when the demo's code will run without isolation here, and why; else ""."""
    found = Backends.probed()
    if found.untrusted:
        return ""
    return ("warning: the demo's programs, which are this package's own, run without isolation "
            f"here; a model's would be refused (bwrap: {found.why_not['bwrap']}; process: "
            f"{found.why_not['process']})")
