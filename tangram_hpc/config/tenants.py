"""Checks a tenant: `[tenants.NAME]` in TOML, or `tenants` in a cluster file of the simulator.

A tenant is a training run or a team that shares a broker with others. Its limits are written as
Slurm's GrpTRES. The scheduler sees a tenant only as a `TenantSpec`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from ..domain.tenant import TENANT_NAME, TENANT_NAME_SAID, TenantSpec
from ..errors import InvalidInput
from .table_rules import SettingsTable, checked_table

_TRES = re.compile(r"(cpu|gres/gpu|mem|endpoint/[^\s,=]+)=(\d{1,12})([KMGT]?)")
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1 << 10, "T": 1 << 20}  # as Slurm: mem is in MiB


class Tenant(SettingsTable):
    """The fields of a tenant."""

    shares: int = Field(1, ge=1, le=1_000_000,
                        description="part of contended units, relative to other tenants' shares")
    priority: int = Field(0, ge=-1_000_000, le=1_000_000,
                          description="tenants of higher priority are served before all others")
    grp_tres: str = Field("", description="most units held at once, such as "
                                          "cpu=64,gres/gpu=8,mem=200G,endpoint/search=4")

    @field_validator("grp_tres")
    @classmethod
    def _known_tres(cls, value: str) -> str:
        limits(value)
        return value

    def spec(self, name: str) -> TenantSpec:
        """Returns the tenant as the scheduler sees it."""
        return TenantSpec(name, self.shares, self.priority, limits(self.grp_tres))


def limits(text: str) -> tuple[tuple[str, int], ...]:
    """Returns the limits in a text like Slurm's GrpTRES, as `TenantSpec.grp_tres` has them.

    Raises:
        ValueError: the text is wrong.
    """
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        matched = _TRES.fullmatch(part.strip())
        if matched is None or (matched[3] and matched[1] != "mem"):
            raise ValueError(f"{part.strip()!r} must be cpu=N, gres/gpu=N, mem=N[K|M|G|T] or "
                             "endpoint/NAME=N")
        resource = {"gres/gpu": "gpu"}.get(matched[1], matched[1].replace("/", ":", 1))
        if resource in found:
            raise ValueError(f"{matched[1]} is there twice")
        amount = int(matched[2])
        found[resource] = math.ceil(amount * _MIB[matched[3]]) if resource == "mem" else amount
    return tuple(found.items())


def tenant_spec(name: str, wanted: Tenant | Mapping[str, Any]) -> TenantSpec:
    """Checks a tenant and returns it as the scheduler sees it.

    Raises:
        InvalidInput: a field is wrong; the text names it.
    """
    if not TENANT_NAME.fullmatch(name):
        raise InvalidInput(f"tenant {name!r}: the name {TENANT_NAME_SAID}")
    return checked_table(Tenant, f"tenant {name}", wanted).spec(name)
