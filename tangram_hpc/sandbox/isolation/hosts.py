"""The names that a sandbox can look up without a network: `localhost`, and its own host name.

Container programs write `/etc/hosts` when they start, so images have none or an empty one. Without
it a test cannot connect to its own server by the name `localhost`, and programs that look up the
name of their host fail. Pure.
"""

from __future__ import annotations

HOSTNAME = "sandbox"
_LOOPBACK = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_OWN = f"127.0.0.1\t{HOSTNAME}\n"


def completed(text: bytes) -> bytes:
    """Returns the text of a hosts file with lines for those of these names that it lacks."""
    names = {name for line in text.splitlines() for name in line.partition(b"#")[0].split()[1:]}
    lines = "".join(line for name, line in (("localhost", _LOOPBACK), (HOSTNAME, _OWN))
                    if name.encode() not in names).encode()
    return text + b"\n" * (bool(lines and text) and not text.endswith(b"\n")) + lines
