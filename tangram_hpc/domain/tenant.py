"""Defines `TenantSpec`: what a site or user grants to one of several tenants of a broker. Pure.

A *tenant* is a training run or a team that shares a broker with others. Its clients name it when
they join. The words are those of Slurm's fair share: a tenant has shares and a priority, and
GrpTRES limits bound what all of its actions and sessions hold together.
"""

from __future__ import annotations

import re

import msgspec

DEFAULT_TENANT = "default"  # the tenant of clients that name none
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TENANT_NAME_SAID = ("must be 1 to 64 letters, digits, dots, underscores and dashes, and begin with "
                    "a letter or digit")


class TenantSpec(msgspec.Struct, frozen=True, array_like=True):
    """What one tenant is granted.

    Attributes:
        name: the name by which clients choose it.
        shares: its part of what is contended, relative to the shares of the other tenants that
            want more than they hold; at least 1.
        priority: tenants with a higher priority are served before all others.
        grp_tres: the most that its actions and sessions may hold at once, as (resource, amount):
            `cpu`, `gpu` and `mem` (in MiB), and `endpoint:NAME` for calls under way. A resource
            that is not named has no limit.
    """

    name: str
    shares: int = 1
    priority: int = 0
    grp_tres: tuple[tuple[str, int], ...] = ()

    def limit(self, resource: str) -> int | None:
        """Returns the limit of a resource; None if there is none."""
        return next((most for name, most in self.grp_tres if name == resource), None)
