"""Defines services and endpoints, the key resources besides `cpu`. Pure.

A service is a model (reward model, judge, teacher) that runs on an aligned block of 1, 2, 4 or 8
GPUs of one node. After a call it stays on its block. It is parked only when something else needs
the GPUs, so the call that next needs it pays `restore_ns` first.

An endpoint is an API that somebody else serves. Its quota is a number of concurrent calls and a
token bucket.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..errors import Throttled, Transient

BLOCK_SIZES = (1, 2, 4, 8)
MICRO = 1_000_000  # rates and bursts are counted in millionths of a token
FALTERED, THROTTLED = 1, 2  # an endpoint failed (5xx), or had too many calls (429)


class ServiceSpec(msgspec.Struct, frozen=True, array_like=True):
    """A GPU service.

    Attributes:
        name: the NAME in `service:NAME`.
        restore_ns: expected time to bring it onto a block; learned from each time that happens.
        weights_mib: host memory that its weights take while it is parked.
        calls: how many calls are expected, if that is known. The placer `static:K` divides the GPUs
            by it.
        backend: the backend that runs it; empty in a simulation.
        options: options of the backend, as JSON. They are not read here.
        degrees: sizes of the blocks on which it can run.
        batch: how many of its calls may run together as one, at most.
        stay_ns: minimum residency. A copy that was brought to a block is not parked before this
            time has passed, unless a call of another service is overdue.
        shares: a label; services with the same label share their parked weights, which count once.
            Empty for a service that shares none.
        node: name of the only node on which it can be; empty for any.
        gpus: the only block of that node on which it can be; empty for any.
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
        """Whether the service may be on this block of the node with this name."""
        return self.node in ("", node) and self.gpus in ((), gpus)

    def restored(self, took_ns: int) -> ServiceSpec:
        """Returns this service with a new estimate of `restore_ns`, after a restore that took
        `took_ns`.

        The first measurement replaces the estimate; each later one moves it by a quarter of the
        difference.
        """
        learned = self.restore_ns + (took_ns - self.restore_ns) // 4
        believed = learned if self.restore_ns else took_ns
        return msgspec.structs.replace(self, restore_ns=believed)


class EndpointSpec(msgspec.Struct, frozen=True, array_like=True):
    """An external API and its quota.

    Attributes:
        name: the NAME in `endpoint:NAME`.
        concurrency: how many calls may run at once.
        rate_micro: tokens per second, in millionths of a token; 0 for no limit on the rate.
        burst_micro: capacity of the token bucket, in millionths of a token. It is full at first.
    """

    name: str
    concurrency: int
    rate_micro: int = 0
    burst_micro: int = MICRO


def pushed_by(failure: BaseException) -> tuple[int, int]:
    """Returns the values of `Outcome.pushed` and `Outcome.retry_after_ns` for a call's exception.

    A `retry_after` that a user's code has set to what is no number counts as 0.
    """
    if not isinstance(failure, Throttled | Transient):
        return 0, 0
    try:
        wait_ns = round(min(max(0.0, float(failure.retry_after)), 86_400.0) * 1e9)
    except (TypeError, ValueError, OverflowError):
        wait_ns = 0
    return (THROTTLED if isinstance(failure, Throttled) or wait_ns else FALTERED), wait_ns


def service_of(key: str) -> str:
    """Returns the name of the service in a key resource; an empty string if it is none."""
    return key[8:] if key != "cpu" and key.startswith("service:") else ""


def endpoint_of(key: str) -> str:
    """Returns the name of the endpoint in a key resource; an empty string if it is none."""
    return key[9:] if key != "cpu" and key.startswith("endpoint:") else ""


def parked_mib(services: Iterable[ServiceSpec]) -> int:
    """Host memory that services take on a node while all of them are parked there. Services that
    share their weights count once; those without a backend take none."""
    by_weights = {s.shares or f"\0{s.name}": s.weights_mib for s in services if s.backend}
    return sum(by_weights.values())
