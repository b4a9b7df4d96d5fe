"""How `tangram info` and `tangram explain` print a shared session."""

from __future__ import annotations

from typing import Any


def shared_line(session: dict[str, Any]) -> str:
    """Returns one line about a shared session: whose it is, who is attached, when it ends."""
    def name(client: dict[str, Any]) -> str:
        holds = " holds it" if client.get("hold") else ""
        return f"{client['client']} ({client['name']}){holds}"

    gone = ", which is gone" if session["owner_gone"] else ""
    line = (f"{session['id']:<11} {session['name']:<19} {session['state']:<9} "
            f"{session['node'] or '-':<15} client {name(session['owner'])}{gone}  attached: "
            + (", ".join(map(name, session["attached"])) or "none"))
    if session["ttl_left_s"] is not None:
        line += f"  ends in {session['ttl_left_s']:.0f} s"
    return line + (f"  idle limit {session['idle_s']:g} s" if session["idle_s"] else "")
