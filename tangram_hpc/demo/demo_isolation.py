"""Chooses the isolation of the demo's programs, and the warning where there is none."""

from __future__ import annotations

from typing import Any

from ..sandbox.manager.backends import Backends


def isolation_options(client: Any) -> dict[str, Any]:
    """Returns the session options for the demo's programs.

    The backend `process` starts fastest, which counts because hundreds of sandboxes open at once;
    else the nodes' best backend is used. If no backend can hold untrusted code, the programs run as
    trusted code, since they ship with this package. A model's programs must never do so.
    """
    works = {name for node in client.ask("nodes")["nodes"] for name in node["untrusted"]}
    return {"backend": "process" if "process" in works else "", "trusted": not works}


def isolation_warning() -> str:
    """Returns the warning that the demo's programs run without isolation here and why; empty if not
    so.
    """
    found = Backends.probed()
    if found.untrusted:
        return ""
    return ("warning: the demo's programs run without isolation here, since they ship with this "
            "package; a model's programs would be refused (bwrap: "
            f"{found.why_not['bwrap']}; process: {found.why_not['process']})")
