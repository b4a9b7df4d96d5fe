"""Defines rollout pools, and the turns that are routed among their services. Pure.

The services of a pool are in buckets, by how many tokens a trajectory has left. An action with a
`turn` needs one service of the pool. The service is chosen when one has room. From then on the
action is a call of that service like any other.
"""

from __future__ import annotations

import msgspec

NAME_MAX = 200  # bytes of a trajectory's name
CONTEXT_MAX = 1 << 32  # tokens
COUNT_MAX = 1 << 20  # running or waiting requests of a service; depth and epochs of a tree
TOKEN_NS_MAX = 10**9  # ns for a token; its product with CONTEXT_MAX is below 2**63
STEP_NS_MAX = 3_600 * 10**9
_NS_DAY = 86_400 * 10**9


class RolloutService(msgspec.Struct, frozen=True, array_like=True):
    """One service of a pool: one instance of the policy, with one KV cache.

    Attributes:
        name: the NAME in `service:NAME`.
        bucket: number of its bucket, from 0, the fewest remaining tokens first.
        degree: how many GPUs its block has.
        running_max: how many requests it runs at once.
        queue_max: how many more requests may wait for it.
        context_max: tokens of the longest context that fits.
        step_ns: time of a decode step without requests.
        request_ns: time that each running request adds to a decode step.
        prefill_ns: time to compute the KV cache of one token of context.
        node: name of the node that holds its KV cache, which decides the cost of moving the cache;
            empty if not known.
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
        name: the POOL in `rollouts:POOL`.
        edges: the most remaining tokens of each bucket but the last.
        services: its services, at least one for each bucket.
        tree: folder in which the learned causal tree is kept; empty for nowhere.
        rule: the rule of moving between buckets, see `scheduler.routing.cmlfq.Cmlfq`.
        payload_edges, depth, least, enough, epochs, nodes_max, since: limits of the causal tree,
            see `scheduler.routing.cmlfq.Shape`.
        transfer: whether the engines move KV caches between services. If not, the cache is computed
            again.
        kv_base_ns, kv_near_ns, kv_far_ns, worth, idle, crowded: costs of moving a trajectory, see
            `scheduler.routing.rollout_router.KvCost`.
        idle_ns: a trajectory is forgotten after this time without a turn and without a tool's
            return.
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
        """Returns this pool with other services."""
        return msgspec.structs.replace(self, services=services)


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory's next turn, as the router needs it. Tokens are whole numbers.

    Attributes:
        pool: the rollout pool.
        trajectory: the client's name for the trajectory. Equal names of two clients mean two
            trajectories.
        prompt: number of the prompt; all samples of one prompt have the same.
        context: tokens of the context that the turn begins with, prompt and tool returns included.
        generated: tokens that the policy has generated in this trajectory so far.
    """

    pool: str
    trajectory: str
    prompt: int
    context: int
    generated: int


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """The route of a turn.

    Attributes:
        pool: the rollout pool.
        service: the service that it was routed to.
        wanted: the bucket that fits the estimate of the trajectory's remaining tokens.
        bucket: the bucket of `service`. It differs from `wanted` if the wanted bucket had no room,
            or if `service` was idle.
        how: `stay` (its KV cache is there already), `transfer` (moving the cache is cheapest) or
            `prefill` (the cache is computed again).
        move_ns: the expected time that `how` takes, in ns.
    """

    pool: str
    service: str
    wanted: int
    bucket: int
    how: str
    move_ns: int


def wrong_number(spec: RolloutsSpec) -> str:
    """Returns a line about the first number of a pool that is out of bounds; empty if none is.

    0 is allowed where the broker fills the number in; for `queue_max`, that is -1.
    """
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
