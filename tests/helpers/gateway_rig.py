"""A gateway for tests, whose messages, connections and time are played by hand."""

from __future__ import annotations

from collections import deque

from tangram_hpc.gateway.driver import Gateway


class Ranks:
    """MPI messages by hand; messages to `stuck` ranks are never delivered."""

    def __init__(self) -> None:
        self.come: deque[tuple[int, int, bytearray]] = deque()
        self.said: list[tuple[int, int, bytes]] = []
        self.stuck: dict[int, int] = {}

    def send(self, rank: int, tag: int, data: object) -> None:
        self.said.append((rank, tag, bytes(data)))  # type: ignore[call-overload]
        if rank in self.stuck:
            self.stuck[rank] += len(self.said[-1][2]) + 1

    def sending(self, rank: int) -> int:
        return self.stuck.get(rank, 0)

    def sweep(self) -> None:
        pass

    def take(self) -> tuple[int, int, bytearray] | None:
        return self.come.popleft() if self.come else None


class Pipes:
    """Connections to a broker, played by hand."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.come: list[tuple[int, bytes, str]] = []
        self.up: set[int] = set()
        self.waited_s = 0.0

    def open(self, name: int) -> None:
        self.calls.append(("open", name))

    def write(self, name: int, data: object) -> None:
        self.calls.append(("write", name, bytes(data)))  # type: ignore[call-overload]

    def unsent(self) -> int:
        return 0

    def connected(self, name: int) -> bool:
        return name in self.up

    def hold(self, name: int, held: bool) -> None:
        self.calls.append(("hold", name, held))

    def close(self, name: int) -> None:
        self.calls.append(("close", name))

    def wait(self, timeout_s: float) -> list[tuple[int, bytes, str]]:
        self.waited_s += timeout_s
        came, self.come = self.come, []
        return came


class Rig:
    """A gateway whose time advances only while it waits, and by `later`."""

    def __init__(self, members: tuple[int, ...] = (0, 1), shares_fate: bool = False) -> None:
        self.ns = 10**9
        self.ranks, self.pipes = Ranks(), Pipes()
        self.gateway = Gateway(self.ranks, self.pipes, members, self.now, 200, lambda: None,
                               shares_fate)

    def now(self) -> int:
        self.ns += 1000
        return self.ns + int(self.pipes.waited_s * 1e9)

    def hear(self, rank: int, tag: int, data: bytes = b"") -> None:
        self.ranks.come.append((rank, tag, bytearray(data)))
        self.gateway.turn()

    def later(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.ns += 500_000_000
            self.gateway.turn()

    def to(self, rank: int) -> list[int]:
        return [tag for to, tag, _ in self.ranks.said if to == rank]
