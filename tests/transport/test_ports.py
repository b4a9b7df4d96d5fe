"""The setting `ports` names the TCP ports that a broker may listen on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tangram_hpc.storage.access import read_access
from tangram_hpc.transport.socket.asyncsock import listen_tcp


def free_pair() -> int:
    """A port that is free, and the next one too."""
    for first in range(42_000, 60_000, 2):
        try:
            with listen_tcp("127.0.0.1", [first]), listen_tcp("127.0.0.1", [first + 1]):
                return first
        except OSError:
            continue
    pytest.skip("no two free ports")


def test_the_first_free_port_is_taken() -> None:
    first = free_pair()
    with listen_tcp("127.0.0.1", range(first, first + 2)) as one, \
            listen_tcp("127.0.0.1", range(first, first + 2)) as other:
        assert [s.getsockname()[1] for s in (one, other)] == [first, first + 1]
        with pytest.raises(OSError, match="in use"):
            listen_tcp("127.0.0.1", range(first, first + 2))


def broker(home: Path, job: str, ports: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "TANGRAM_HOME": str(home), "TANGRAM_BIND": "127.0.0.1",
               "TANGRAM_PORTS": ports}
    return subprocess.Popen([sys.executable, "-m", "tangram_hpc", "broker", "--job", job],
                            env=environ, stderr=subprocess.PIPE, text=True)


def test_a_broker_listens_on_a_port_that_was_named_or_says_that_there_is_none(tmp_path: Path
                                                                              ) -> None:
    first = free_pair()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        child = broker(tmp_path, "one", f"{first}-{first + 1}")
        try:
            path = tmp_path / "jobs" / "one" / "access.json"
            while not path.exists():
                assert child.poll() is None, child.communicate()[1]
            assert f"tcp:127.0.0.1:{first + 1}" in read_access(path).addresses
        finally:
            child.terminate()
            child.communicate(timeout=60)
        second = broker(tmp_path, "two", str(first))
        _, said = second.communicate(timeout=60)
    assert second.returncode == 2 and len(said.splitlines()) == 1
    assert f"`ports`: no port of {first} can be had on 127.0.0.1" in said
