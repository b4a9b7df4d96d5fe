"""The HTTP server of a `LocalCluster`: `tangram serve http` as a child process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import BrokerUnreachable

_START_S = 60.0


class HttpServer:
    """A running `tangram serve http`.

    Args:
        program: the arguments of the interpreter that start `tangram`.
        environ: the environment of the cluster's processes.
        access: the cluster's access file.
        lifeline: the reading end of the pipe whose end ends the cluster's processes.
        log: the file for what the server says.

    Attributes:
        url: where it is reached, such as `http://127.0.0.1:40123`.
        key: the key that each request needs.

    Raises:
        BrokerUnreachable: it did not start; the message holds its last line.
    """

    def __init__(self, program: Sequence[str], environ: dict[str, str], access: Path,
                 lifeline: int, log: Path) -> None:
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *program, "serve", "http", "--lifeline", str(lifeline)],
                env={**environ, "TANGRAM_ACCESS": str(access)}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                pass_fds=[lifeline])
        line = self._first_line()
        if not line:
            self.close()
            said = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise BrokerUnreachable("the HTTP server did not start: "
                                    f"{said.removeprefix('tangram: error: ')} ({log})")
        told = json.loads(line)
        self.url: str = told["url"]
        self.key: str = told["key"]

    def _first_line(self) -> bytes:
        out = self._process.stdout
        assert out is not None
        ready = select.select([out], [], [], _START_S)[0]
        return os.read(out.fileno(), 4096) if ready else b""

    def close(self) -> None:
        """Ends the server. A second call does nothing."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
