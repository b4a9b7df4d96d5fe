"""Chooses the isolation of the demo's programs, and the warning where there is none."""

from __future__ import annotations

from typing import Any

from ..domain.isolation import guards_without_image
from ..sandbox.manager.backends import Backends


def isolation_options(client: Any) -> dict[str, Any]:
    """Returns the session options for the demo's programs.

    The backend `process` is used where it works, because it starts fastest and hundreds of
    sandboxes open at once; else the nodes' best backend. If no backend can hold untrusted code, the
    programs run as trusted code, since they ship with this package. Programs that a model wrote
    must never run as trusted code.
    """
    works = {name for node in client.ask("nodes")["nodes"] for name in node["untrusted"]}
    return {"backend": "process" if "process" in works else "",
            "trusted": not guards_without_image(tuple(works))}


def isolation_warning() -> str:
    """Returns a warning, with the reason, if the demo's programs run without isolation here.

    The text is empty if they are isolated.
    """
    found = Backends.probed()
    if guards_without_image(found.untrusted):
        return ""
    return ("warning: the demo's programs run without isolation here, since they ship with this "
            "package; a model's programs would be refused (bwrap: "
            f"{found.why_not['bwrap']}; process: {found.why_not['process']})")
