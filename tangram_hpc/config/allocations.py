"""Checks the table `[elastic]`, by which a user lets the broker request and give back allocations.

It is checked before anything is asked of Slurm, and an error names the wrong field in one line. The
scheduler sees an `AllocPolicy` and nothing else of it. Nothing is requested unless the user gave a
bound on nodes and on core-hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..domain.allocation import AllocPolicy, SatelliteShape
from ..errors import InvalidInput
from .first_error import first_error

_WORD = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
_S = 10**9


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Satellite(_Model):
    """One entry of `[[elastic.satellites]]`: a kind of satellite. Preferred kinds come first."""

    name: str = Field(pattern=_WORD, description="of this kind; one of its own")
    partition: str = Field("", description="empty for the site's default")
    qos: str = Field("", description="empty for the site's default")
    account: str = Field("", description="empty for the site's default")
    nodes: int = Field(1, ge=1, le=1024, description="nodes of one; given back as a whole")
    cpus: int = Field(ge=1, le=4096, description="CPUs asked for and lent of each node")
    mem_mib: int = Field(0, ge=0, description="memory of each node; 0 for the site's default")
    gpus: int = Field(0, ge=0, le=64, description="GPUs of each node")
    gres: str = Field("", description="as Slurm calls them; empty for gpu:N")
    time_min: float = Field(60.0, ge=1, le=43200, description="time limit; all of it counts until "
                                                              "it has ended")
    component: str = Field("satellite", pattern=_WORD, description="that its workers join as")


class ElasticSettings(_Model):
    """The table `[elastic]`. Nothing is requested while `max_nodes` is 0."""

    max_nodes: int = Field(0, ge=0, le=4096, description="satellites' nodes at once, those asked "
                                                         "for included")
    max_core_hours: float = Field(0.0, ge=0, description="of all satellites together; those that "
                                                         "live count with all of their limit")
    idle_release_s: float = Field(120.0, ge=0, description="idle for so long, given back; 0: never")
    give_back: Literal["satellites", "all"] = Field(
        "satellites", description="all: het components, and satellites that you submitted, too")
    min_nodes: int = Field(1, ge=1, description="nodes that stay, whatever idles")
    target_s: float = Field(60.0, ge=1, description="the queue should drain within so long")
    grow_after_s: float = Field(10.0, ge=0, description="more is asked for when it has not been "
                                                        "expected to for so long")
    arrive_s: float = Field(30.0, ge=0, description="from request to worker, until that is learned")
    patience_s: float = Field(600.0, ge=1, description="a request that waits longer is withdrawn "
                                                       "for one of another kind")
    join_s: float = Field(120.0, ge=1, description="a satellite that runs so long without a worker "
                                                   "is given up")
    backoff_s: float = Field(60.0, ge=1, description="none of a kind after a rejection of it; "
                                                     "doubles with each")
    backoff_max_s: float = Field(3600.0, ge=1, description="and is never longer")
    asks_max: int = Field(4, ge=1, le=8, description="requests at once; Slurm's port makes 8 calls "
                                                     "at once at most")
    setup: str = Field("", description="shell command that makes `tangram` callable on a "
                                       "satellite; empty: the broker's own folder on PATH")
    scratch: str = Field("", description="as the template's key; empty for its default")
    satellites: tuple[Satellite, ...] = ()


Elastic = ElasticSettings  # the name until this release; goes with the next one


def elastic(table: Mapping[str, Any], overrides: Mapping[str,
                                                         Any] | None = None) -> ElasticSettings:
    """Returns the table, checked.

    Args:
        table: the table as it was written.
        overrides: values from the command line, which win unless they are None.

    Raises:
        InvalidInput: a field is wrong; the text names it.
    """
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    try:
        told = ElasticSettings(**{**table, **given})
    except ValidationError as error:
        field, said = first_error(error, ElasticSettings)
        raise InvalidInput(f"config field `elastic.{field}`: {said}") from None
    names = [s.name for s in told.satellites]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise InvalidInput(f"config field `elastic.satellites`: {twice!r} is there twice")
    if told.max_nodes and not told.max_core_hours:
        raise InvalidInput("config field `elastic.max_core_hours`: say how many core-hours "
                           "satellites may use; without that none is asked for")
    if told.max_nodes and not told.satellites:
        raise InvalidInput("config field `elastic.satellites`: max_nodes is "
                           f"{told.max_nodes}, and there is no [[elastic.satellites]] to ask for")
    return told


def alloc_policy(told: ElasticSettings) -> AllocPolicy:
    """Returns what the scheduler needs of the table."""
    def ns(seconds: float) -> int:
        return round(seconds * _S)

    return AllocPolicy(
        told.max_nodes, round(told.max_core_hours * 3600) * _S, told.min_nodes, ns(told.target_s),
        ns(told.grow_after_s), ns(told.arrive_s), ns(told.idle_release_s),
        told.give_back == "all", ns(told.patience_s), ns(told.join_s), ns(told.backoff_s),
        ns(told.backoff_max_s), told.asks_max,
        tuple(SatelliteShape(s.name, s.partition, s.qos, s.account, s.nodes, s.cpus, s.mem_mib,
                             s.gpus, s.gres, ns(s.time_min * 60), s.component)
              for s in told.satellites))
