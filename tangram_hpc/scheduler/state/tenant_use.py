"""Pure. What each tenant uses of each resource, and which tenant is served next.

Problem. Several training runs share one broker. Turns between clients count actions, so a run with
more clients, or with longer or wider actions, gets more cores than the others.

Idea: weighted fair sharing of units over time. For each resource a tenant has a *virtual time*,
the unit-nanoseconds that it has held, divided by its shares; the tenant with the lowest is next.
While no action of a tenant waits, its virtual time may fall behind. When one begins to wait, the
virtual time is set to at least that of the others that wait (as in start-time fair queueing, Goyal,
Vin, Cheng, SIGCOMM 1996), so nobody saves up service, and a tenant that comes back gets its share
at once. With past use alone, the tenant that is a little behind would take everything for a moment.
So what a tenant holds now counts as well, as if it would hold it for HORIZON_NS more. With units
enough, tenants then hold units in proportion to their shares; where units are few or
cannot be taken back, they get them in proportion over time.

A call holds one of its endpoint's concurrent calls. Where an endpoint allows fewer calls a second
than could run, a short call costs more than that: what the rate leaves for each call
(`EndpointEntry.least_ns`). Actions without units are counted: each costs one unit for HORIZON_NS.

Invariants: everything here follows from the events of the ledger alone, so a replay agrees. What a
tenant holds is the sum over its leases and sessions (`Ledger.check`). With one tenant nothing is
ever compared, and all placements are as if there were no tenants. Its actions cost a few additions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...domain.tenant import DEFAULT_TENANT, TenantSpec

HORIZON_NS = 250_000_000  # on two cores, shares of 3:1 differ least over 10 s with this value
LAG_NS = 30_000_000_000  # no tenant is more behind than what the others got in this time
MEMORY = "mem"  # the resource that open sessions and leases hold, in MiB
NO_LIMIT = 1 << 60
_SCALE = 1 << 20  # virtual times are whole numbers; shares divide them

Rank = tuple[int, int, str]  # (- priority, virtual time, name): the lowest is served first


@dataclass(slots=True)
class TenantUse:
    """One tenant's use of one resource.

    Attributes:
        spec: what the tenant is granted.
        held: units that its leases (or sessions) hold.
        waiting: how many of its actions (or sessions) wait for units.
        used: unit-nanoseconds that it has held up to `since`, and what `ResourceUse.add` counted.
        since: the time up to which `used` counts, epoch ns.
        changed_at: when `held` last changed, epoch ns.
        limit: the most units that it may hold.
    """

    spec: TenantSpec
    held: int = 0
    waiting: int = 0
    used: int = 0
    since: int = 0
    changed_at: int = 0
    limit: int = NO_LIMIT

    @property
    def hungry(self) -> bool:
        """Whether an action of it waits for units that it may have."""
        return self.waiting > 0 and self.held < self.limit

    def used_at(self, now: int) -> int:
        """Returns the unit-nanoseconds that it has held up to `now`."""
        return self.used + self.held * max(0, now - self.since)


class ResourceUse:
    """All tenants' use of one resource.

    Attributes:
        name: the resource: `cpu`, `gpu`, `mem`, `nothing` or `endpoint:NAME`.
        counted: whether starts count instead of the time for which units are held.
        lag_ns: what a tenant may be owed at least, in unit-nanoseconds, however few units the
            tenant holds that is most ahead (see `_bound_lag`).
        tenants: by name, those that ever used the resource or waited for it.
    """

    __slots__ = ("_first", "_hungry", "_tenants", "counted", "lag_ns", "name", "tenants")

    def __init__(self, name: str, tenants: Tenants) -> None:
        self.name, self._tenants = name, tenants
        self.counted, self.lag_ns = name == "nothing", 0
        self.tenants: dict[str, TenantUse] = {}
        # kept once there are two tenants: those that are hungry, and the one that is most ahead,
        # when it last changed
        self._hungry: dict[str, TenantUse] = {}
        self._first: TenantUse | None = None

    def of(self, tenant: str) -> TenantUse:
        """Returns the use of one tenant; kept from now on if there was none."""
        use = self.tenants.get(tenant)
        if use is None:
            self._tenants.spec(tenant)
            use = self.tenants[tenant] = self.look_up(tenant)
            if len(self.tenants) == 2:
                self._note(next(iter(self.tenants.values())))  # which was not compared before
        return use

    def look_up(self, tenant: str) -> TenantUse:
        """Returns the use of one tenant, which is nothing if it never used the resource; changes
        nothing.
        """
        use = self.tenants.get(tenant)
        if use is None:
            spec = self._tenants.specs.get(tenant) or TenantSpec(tenant)
            now = self._tenants.now
            use = TenantUse(spec, since=now, changed_at=now, limit=self._limit(spec))
        return use

    def grant(self, spec: TenantSpec) -> None:
        """Sets what a tenant that uses the resource is granted from now on. Its virtual time stays
        as it is.
        """
        use = self.tenants[spec.name]
        self._settle(use)
        use.used = use.used * spec.shares // use.spec.shares
        use.spec, use.limit = spec, self._limit(spec)
        self._note(use)

    def _limit(self, spec: TenantSpec) -> int:
        limit = spec.limit(self.name)
        return NO_LIMIT if limit is None else limit

    def wait(self, use: TenantUse) -> None:
        """Counts an action of a tenant, whose use `of` has returned, that begins to wait."""
        if len(self.tenants) == 1:
            use.waiting += 1
            return
        if not use.hungry:
            self._catch_up(use)
        use.waiting += 1
        self._note(use)

    def leave(self, use: TenantUse) -> None:
        """Counts an action that waits no more."""
        use.waiting -= 1
        if len(self.tenants) > 1:
            self._note(use)

    def take(self, tenant: str, units: int) -> None:
        """Counts units that a lease or session of a tenant holds from now on; negative for units
        that it gives back.
        """
        use = self.tenants.get(tenant) or self.of(tenant)
        if len(self.tenants) == 1:
            self._settle(use, units)
            return
        self._settle(use)
        if units > 0:
            self._bound_lag(use)
        hungry = use.hungry
        self._settle(use, units)
        if not hungry and use.hungry:
            self._catch_up(use)
        self._note(use)

    def add(self, tenant: str, unit_ns: int) -> None:
        """Counts unit-nanoseconds that a tenant used beyond those for which it held units."""
        use = self.of(tenant)
        use.used += unit_ns
        if len(self.tenants) > 1:
            self._note(use)

    def _note(self, use: TenantUse) -> None:
        """Notes a tenant that became hungry or is so no more, or that is most ahead."""
        if use.hungry:
            self._hungry[use.spec.name] = use
        else:
            self._hungry.pop(use.spec.name, None)
        first = self._first
        if first is not use and (
                first is None or self._virtual_time(use) > self._virtual_time(first)):
            self._first = use

    def _settle(self, use: TenantUse, units: int = 0) -> None:
        """Counts what a tenant has used up to now, and `units` more that it holds from now on."""
        since, now = use.since, self._tenants.now
        if self.counted:
            use.used += max(0, units) * HORIZON_NS
        elif now > since:
            use.used += use.held * (now - since)
        use.held += units
        if units:
            use.changed_at = now
        if now > since:
            use.since = now

    def _virtual_time(self, use: TenantUse) -> int:
        used = use.used if self.counted else use.used_at(self._tenants.now)
        return used * _SCALE // use.spec.shares

    def _catch_up(self, use: TenantUse) -> None:
        """Lets a tenant that begins to wait start no earlier than the others are.

        If no other one waits, what the others have held was not taken from anybody, so it does not
        count against them. O(tenants that wait).
        """
        first = self._first
        if first is None or first is use:
            return
        self._settle(use)
        hungry = [self._virtual_time(each) for each in self._hungry.values() if each is not use]
        floor = min(hungry) if hungry else self._virtual_time(first)
        use.used = max(use.used, floor * use.spec.shares // _SCALE)

    def _bound_lag(self, use: TenantUse) -> None:
        """Forgets what a tenant is behind by more than the first one holds in LAG_NS, or by more
        than `lag_ns` if that is more; something else kept it waiting.
        """
        first = self._first
        if first is not None and first is not use and first.held:
            behind = max(LAG_NS * first.held, self.lag_ns) * _SCALE // first.spec.shares
            least = (self._virtual_time(first) - behind) * use.spec.shares // _SCALE
            use.used = max(use.used, least)


@dataclass(slots=True)
class Tenants:
    """The tenants of a broker.

    Attributes:
        specs: what is granted to each tenant that was declared or named by a client.
        of_client: the tenant of each client, by number; clients of the default tenant are left
            out.
        resources: the use of each resource, by its name.
        now: the time of the last event; epoch ns.
        limited: whether a tenant has a limit.
    """

    specs: dict[str, TenantSpec] = field(default_factory=dict)
    of_client: dict[int, str] = field(default_factory=dict)
    resources: dict[str, ResourceUse] = field(default_factory=dict)
    now: int = 0
    limited: bool = False

    def spec(self, tenant: str) -> TenantSpec:
        """Returns what a tenant is granted: one share and no limit if it was not declared."""
        spec = self.specs.get(tenant)
        if spec is None:
            spec = self.specs[tenant] = TenantSpec(tenant)
        return spec

    def tenant_of(self, client: int) -> str:
        """Returns the tenant of a client."""
        return self.of_client.get(client, DEFAULT_TENANT)

    def use(self, resource: str) -> ResourceUse:
        """Returns the use of a resource."""
        found = self.resources.get(resource)
        if found is None:
            found = self.resources[resource] = ResourceUse(resource, self)
        return found

    def look_up(self, resource: str, tenant: str) -> TenantUse:
        """Returns a tenant's use of a resource, which is nothing if it never used it; changes
        nothing.
        """
        found = self.resources.get(resource) or ResourceUse(resource, self)
        return found.look_up(tenant)

    @property
    def compared(self) -> bool:
        """Whether there are several tenants, or one that has a limit."""
        return self.limited or len(self.specs) > 1

    def declare(self, spec: TenantSpec) -> None:
        """Sets what a tenant is granted from now on."""
        self.specs[spec.name] = spec
        for resource in self.resources.values():
            if spec.name in resource.tenants:
                resource.grant(spec)
        self.limited = any(each.grp_tres for each in self.specs.values())

    def clock_set(self, now: int) -> None:
        """Goes on at `now`, which may be earlier than the last event, since the wall clock of a
        broker that was started again may have been set back. Without this, nothing would count
        before the earlier time is reached again.
        """
        for resource in self.resources.values():
            for use in resource.tenants.values():
                use.since, use.changed_at = min(use.since, now), min(use.changed_at, now)

    def turns(self, resource: str, now: int) -> TenantTurns | None:
        """Returns the order of the tenants at `now`; None if there is nothing to compare."""
        if not self.compared:
            return None
        return TenantTurns(self.resources.get(resource) or ResourceUse(resource, self), self, now)


class TenantTurns:
    """The order of tenants in one resource during one pass of a placer, which draws it down.

    A rank costs O(1). Nothing here changes what the ledger holds.

    Attributes:
        given: the units that each tenant was given in this pass, less those that were taken away.
    """

    __slots__ = ("_now", "_started", "_tenants", "_use", "given")

    def __init__(self, use: ResourceUse, tenants: Tenants, now: int) -> None:
        self._use, self._tenants, self._now = use, tenants, now
        self.given: dict[str, int] = {}
        # tenant -> (- priority, what it has used and holds, shares), as the pass began
        self._started: dict[str, tuple[int, int, int]] = {}

    def copy(self) -> TenantTurns:
        """Returns a copy that is drawn down by itself."""
        copied = TenantTurns(self._use, self._tenants, self._now)
        copied.given, copied._started = dict(self.given), self._started
        return copied

    def tenant_of(self, client: int) -> str:
        """Returns the tenant of a client."""
        return self._tenants.tenant_of(client)

    def rank(self, tenant: str, more: int = 0) -> Rank:
        """Returns the rank that a tenant would have if it held `more` units than it does."""
        started = self._started.get(tenant)
        if started is None:
            started = self._started[tenant] = self._start(tenant)
        priority, used, shares = started
        used += (more + self.given.get(tenant, 0)) * HORIZON_NS
        return priority, used * _SCALE // shares, tenant

    def _start(self, tenant: str) -> tuple[int, int, int]:
        use = self._use.look_up(tenant)
        used = use.used if self._use.counted else use.used_at(self._now) + use.held * HORIZON_NS
        return -use.spec.priority, used, use.spec.shares

    def shares(self, tenant: str) -> int:
        """Returns the shares of a tenant."""
        return self._use.look_up(tenant).spec.shares

    def room(self, tenant: str) -> int:
        """Returns how many more units a tenant may hold."""
        use = self._use.look_up(tenant)
        return use.limit - use.held - self.given.get(tenant, 0)

    def priority(self, tenant: str) -> int:
        """Returns the priority of a tenant."""
        return self._use.look_up(tenant).spec.priority

    def limit(self, tenant: str) -> int:
        """Returns the most units that a tenant may hold."""
        return self._use.look_up(tenant).limit

    def held(self, tenant: str) -> int:
        """Returns how many units a tenant holds, with those that it was given in this pass."""
        return self._use.look_up(tenant).held + self.given.get(tenant, 0)

    def changed_at(self, tenant: str) -> int:
        """Returns since when a tenant has held as many units as now, in epoch ns."""
        return self._use.look_up(tenant).changed_at

    def present(self) -> list[str]:
        """Returns the tenants that hold units or wait for some."""
        return [name for name, use in self._use.tenants.items() if use.held or use.waiting]

    def holders(self) -> list[str]:
        """Returns the tenants that hold units."""
        return [name for name, use in self._use.tenants.items()
                if use.held + self.given.get(name, 0) > 0]

    def charge(self, tenant: str, units: int) -> None:
        """Counts units that a tenant is given in this pass, or that are taken from it."""
        self.given[tenant] = self.given.get(tenant, 0) + units

    def free_to_start(self, tenant: str) -> int:
        """Returns how many more units a tenant may hold now. What it was given in this pass behind
        other leases does not count, as those hold nothing yet."""
        use = self._use.look_up(tenant)
        return use.limit - use.held

    def may_follow(self, before: str, tenant: str) -> bool:
        """Returns whether a tenant's lease may be queued behind one of the tenant `before`.

        When its turn comes, it gets the unit of that lease. What a tenant with a limit holds by
        then is not known, unless the unit is its own already. And if others took over its units in
        this way, but it never theirs, it would lose one after the other.
        """
        return before == tenant or min(self.room(before), self.room(tenant)) > NO_LIMIT >> 1

    @property
    def contended(self) -> bool:
        """Whether more than one tenant holds units or waits for some."""
        return sum(use.hungry or use.held > 0 for use in self._use.tenants.values()) > 1


def copy_of(turns: TenantTurns | None) -> TenantTurns | None:
    """Returns a copy that is drawn down by itself; None of None."""
    return turns.copy() if turns is not None else None
