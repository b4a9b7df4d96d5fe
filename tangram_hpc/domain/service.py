"""Pure. `ServiceSpec` and `EndpointSpec`: what an action may name as its key besides `cpu`.

A service is a model (reward, judge, teacher) that runs on an aligned block of 1, 2, 4 or 8 GPUs of
one node. It stays on its block after a call and is parked only when the GPUs are wanted for
something else, so bringing it back costs `restore_ns` at the start of the call that needs it. An
endpoint is somebody else's API: so many calls at once, and a token bucket.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..errors import Throttled, Transient

BLOCK_SIZES = (1, 2, 4, 8)
MICRO = 1_000_000  # parts of a token that rates and bursts are counted in
FALTERED, THROTTLED = 1, 2  # how an endpoint pushed back: it failed (5xx), or said too many (429)


class ServiceSpec(msgspec.Struct, frozen=True, array_like=True):
    """A GPU service.

    Attributes:
        name: what `service:NAME` names.
        restore_ns: what bringing it onto a block costs; learned from then on.
        weights_mib: host memory that it takes while it is parked.
        calls: how many calls of it are expected, where that is known; used to deal GPUs out.
        backend: what runs it; empty in a simulation.
        options: what the backend is told, as JSON; opaque here.
        degrees: sizes of the blocks that it runs on.
        batch: at most so many calls of it run as one.
        stay_ns: once brought to a block it is not parked for so long, unless a call is overdue.
        node, gpus: the only place where it can stand: the name of a node, and its block there;
            empty for any.
        shares: its parked weights are those of every service that says the same word, and count
            once; empty for none.
    """

    name: str
    restore_ns: int = 0
    weights_mib: int = 0
    calls: int = 0
    backend: str = ""
    options: bytes = b""
    degrees: tuple[int, ...] = (1,)
    batch: int = 1
    stay_ns: int = 0
    shares: str = ""
    node: str = ""
    gpus: tuple[int, ...] = ()

    def may_stand(self, node: str, gpus: tuple[int, ...]) -> bool:
        """Whether it can be brought to this block of the node of this name."""
        return self.node in ("", node) and self.gpus in ((), gpus)

    def restored(self, took_ns: int) -> ServiceSpec:
        """As it is believed to be after bringing it in once took so long."""
        learned = self.restore_ns + (took_ns - self.restore_ns) // 4
        believed = learned if self.restore_ns else took_ns
        return msgspec.structs.replace(self, restore_ns=believed)


class EndpointSpec(msgspec.Struct, frozen=True, array_like=True):
    """An external API and its quota.

    Attributes:
        name: what `endpoint:NAME` names.
        concurrency: calls at once.
        rate_micro: millionths of a token a second; 0 for no limit on the rate.
        burst_micro: millionths of a token that the bucket holds; it is full at first.
    """

    name: str
    concurrency: int
    rate_micro: int = 0
    burst_micro: int = MICRO


def pushed_by(failure: BaseException) -> tuple[int, int]:
    """What an attempt's exception says of its endpoint: `pushed` and `retry_after_ns` of Outcome.
    """
    if not isinstance(failure, Throttled | Transient):
        return 0, 0
    wait_ns = round(min(max(0.0, failure.retry_after), 86_400.0) * 1e9)
    return (THROTTLED if isinstance(failure, Throttled) or wait_ns else FALTERED), wait_ns


def service_of(key: str) -> str:
    """The service that a key names; empty when it names none."""
    return key[8:] if key != "cpu" and key.startswith("service:") else ""


def endpoint_of(key: str) -> str:
    """The endpoint that a key names; empty when it names none."""
    return key[9:] if key != "cpu" and key.startswith("endpoint:") else ""


def parked_mib(services: Iterable[ServiceSpec]) -> int:
    """Host memory that services take on a node while all of them are parked there. Services that
    share their weights count once; those without a backend take none."""
    by_weights = {s.shares or f"\0{s.name}": s.weights_mib for s in services if s.backend}
    return sum(by_weights.values())
