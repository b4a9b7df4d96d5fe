"""Pure. Rollout pools: services among which a trajectory's turns are dealt, and one such turn.

A pool's services stand in buckets by how many tokens a trajectory has left. An action with a `turn`
asks for one service of the pool; which one is decided when there is room, and from then on it is a
call of that service like any other.
"""

from __future__ import annotations

import msgspec

NAME_MAX = 200  # bytes of a trajectory's name
CONTEXT_MAX = 1 << 32  # tokens
COUNT_MAX = 1 << 20  # of what runs or waits at a service, returns and epochs
TOKEN_NS_MAX = 10**9  # that a token takes; with CONTEXT_MAX less than 2**63
STEP_NS_MAX = 3_600 * 10**9
_NS_DAY = 86_400 * 10**9


class RolloutService(msgspec.Struct, frozen=True, array_like=True):
    """One service of a pool, which is one instance: its KV is taken to be in one place.

    Attributes:
        name: what `service:NAME` names.
        bucket: from 0, by what is left of a trajectory.
        degree: GPUs of its block.
        running_max, queue_max: requests that it runs at once, and that may wait for it beyond.
        context_max: tokens of the longest context that fits.
        step_ns, request_ns: a decode step takes so long, and so much longer for each request.
        prefill_ns: what a token of a context takes that is computed again.
        node: where its KV lies, for the price of moving it; empty: nobody knows.
    """

    name: str
    bucket: int
    degree: int
    running_max: int
    queue_max: int
    context_max: int
    step_ns: int
    request_ns: int
    prefill_ns: int
    node: str = ""


class RolloutsSpec(msgspec.Struct, frozen=True, array_like=True):
    """A rollout pool.

    Attributes:
        name: what turns name.
        edges: the most remaining tokens of each bucket but the last.
        services: at least one in each bucket.
        tree: folder in which what was learned is kept; empty: nowhere.
        rule: of moving between buckets, see `scheduler.routing.cmlfq.Cmlfq`.
        payload_edges, depth, least, enough, epochs, nodes_max, since: see
            `scheduler.routing.cmlfq.Shape`.
        transfer: whether the engines move KV between services; if not it is computed again.
        kv_base_ns, kv_near_ns, kv_far_ns, worth, idle, crowded: see
            `scheduler.routing.rollout_router.KvCost`.
        idle_ns: a trajectory without a turn or a tool's return for so long is forgotten.
    """

    name: str
    edges: tuple[int, ...]
    services: tuple[RolloutService, ...]
    tree: str = ""
    rule: str = "nearest"
    payload_edges: tuple[int, int] = (1_000, 12_000)
    depth: int = 24
    least: int = 4
    enough: int = 200
    epochs: int = 8
    nodes_max: int = 20_000
    since: bool = True
    transfer: bool = False
    kv_base_ns: int = 10_000_000
    kv_near_ns: int = 8_000
    kv_far_ns: int = 18_000
    worth: int = 8
    idle: int = 500
    crowded: int = 2000
    idle_ns: int = _NS_DAY

    def with_services(self, services: tuple[RolloutService, ...]) -> RolloutsSpec:
        """The same among these services."""
        return msgspec.structs.replace(self, services=services)


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What a trajectory's next turn needs to be dealt. Tokens are whole numbers.

    Attributes:
        pool: the rollout pool.
        trajectory: its client's name for the trajectory; two clients' never mix.
        prompt: which prompt it began with; samples of one prompt have one number.
        context: tokens that the turn begins with, prompt and returns included.
        generated: tokens that the policy has generated in this trajectory so far.
    """

    pool: str
    trajectory: str
    prompt: int
    context: int
    generated: int


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """Where a turn went.

    Attributes:
        pool, service: which it was given to.
        wanted: the bucket that what is left of it was believed to belong to.
        bucket: the service's own; another one where that had no room or idled.
        how: `stay` (its KV is there), `transfer` (moving it is cheapest), or `prefill`.
        move_ns: what that was expected to take.
    """

    pool: str
    service: str
    wanted: int
    bucket: int
    how: str
    move_ns: int


def wrong_number(spec: RolloutsSpec) -> str:
    """Which number of a pool is out of its bounds; empty if none is. 0 (of `queue_max`: -1) is for
    what the broker fills in."""
    least = {"queue_max": -1, "idle_ns": 1}
    most = {"context_max": CONTEXT_MAX, "running_max": COUNT_MAX, "queue_max": COUNT_MAX,
            "step_ns": STEP_NS_MAX, "request_ns": STEP_NS_MAX, "prefill_ns": TOKEN_NS_MAX,
            "kv_base_ns": STEP_NS_MAX, "kv_near_ns": TOKEN_NS_MAX, "kv_far_ns": TOKEN_NS_MAX,
            "depth": COUNT_MAX, "epochs": COUNT_MAX}
    for part in (spec, *spec.services):
        for name in part.__struct_fields__:
            value, lo, hi = getattr(part, name), least.get(name, 0), most.get(name, 1 << 62)
            for each in value if isinstance(value, tuple) else (value,):
                if type(each) is int and not lo <= each <= hi:
                    return f"{name}: {each} is not from {lo} to {hi}"
    return ""
