"""Checks an endpoint: `register_endpoint(name, ...)`, or `[endpoints.NAME]` in TOML.

An endpoint is checked before anything is sent, and an error names the wrong field in one line. The
scheduler sees it only as an `EndpointSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from ..domain.service import MICRO, EndpointSpec
from .table_rules import SettingsTable, check_name, checked_table


class Quota(SettingsTable):
    """The limits that the owner of an API sets for its callers."""

    concurrency: int = Field(64, ge=1, le=1 << 20, description="calls in flight at the same time")
    rate: float = Field(0.0, ge=0, le=1e6, description="calls per second; 0: no limit")
    burst: float | None = Field(None, ge=1, le=1e6, description="calls at once after a pause; "
                                                                "default: those of one second")
    jitter_ms: float = Field(50.0, ge=0, le=10000,
                             description="by how many ms the delays of two calls on their way to "
                                         "the endpoint may differ")

    @field_validator("rate")
    @classmethod
    def _counted_rate(cls, value: float) -> float:
        """Refuses a rate that the scheduler, which counts millionths, would take for no limit."""
        if value and round(value * MICRO) == 0:
            raise ValueError(f"must be 0 for no limit, or at least {1 / MICRO:g}")
        return value

    def bucket(self) -> float:
        """Returns the capacity of the token bucket, in tokens; at least one.

        The capacity is the endpoint's burst, less the tokens that calls could take too early
        because of the jitter.
        """
        burst = self.burst if self.burst is not None else max(1.0, self.rate)
        return max(1.0, burst - self.rate * self.jitter_ms / 1e3)


def endpoint_spec(name: str, wanted: Quota | Mapping[str, Any]) -> EndpointSpec:
    """Checks an endpoint and returns it as the scheduler sees it.

    Raises:
        InvalidInput: a field is wrong; the text names it.
    """
    check_name("endpoint", name)
    quota = checked_table(Quota, f"endpoint {name}", wanted)
    return EndpointSpec(name, quota.concurrency, round(quota.rate * MICRO),
                        round(quota.bucket() * MICRO))
