"""Checks the tables of the settings, each by the module that knows its fields.

The settings hold tables such as `[elastic]` as they were written, because only the process that
uses a table reads it. `tangram config` starts nothing, and says with this module what the broker
and the planner would refuse.
"""

from __future__ import annotations

from .allocations import elastic
from .endpoints import endpoint_spec
from .planner.planner_settings import planner_settings
from .rollouts import rollouts_spec
from .services import service_spec
from .settings import Config
from .tenants import tenant_spec


def check_tables(config: Config) -> None:
    """Checks all tables.

    Raises:
        InvalidInput: a field of a table is unknown or wrong; the text names it.
    """
    elastic(config.elastic)
    planner_settings(config.planner)
    for name, table in config.endpoints.items():
        endpoint_spec(name, table)
    for name, table in config.services.items():
        service_spec(name, table)
    for name, table in config.rollouts.items():
        rollouts_spec(name, table)
    for name, table in config.tenants.items():
        tenant_spec(name, table)
