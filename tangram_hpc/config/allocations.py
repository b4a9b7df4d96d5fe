"""Checks the table `[elastic]`, by which a user lets the broker request and give back allocations.

The table is checked before Slurm gets any request, and an error names the wrong field in one line.
The scheduler sees the table only as an `AllocPolicy`. Nothing is requested unless the user gave a
bound on nodes and on core-hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from ..domain.allocation import AllocPolicy, SatelliteShape
from ..errors import InvalidInput
from .first_error import first_error
from .table_rules import SettingsTable

_WORD = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
_S = 10**9


class Satellite(SettingsTable):
    """One entry of `[[elastic.satellites]]`: a kind of satellite. Preferred kinds come first."""

    name: str = Field(pattern=_WORD, description="name of this kind, which no other kind has")
    partition: str = Field("", description="Slurm partition; empty: the site's default")
    qos: str = Field("", description="Slurm QOS; empty: the site's default")
    account: str = Field("", description="Slurm account; empty: the site's default")
    nodes: int = Field(1, ge=1, le=1024, description="nodes of one satellite, which are given back "
                                                     "together")
    cpus: int = Field(ge=1, le=4096, description="CPUs to request and to lend on each node")
    mem_mib: int = Field(0, ge=0, le=1 << 40,
                         description="memory to request on each node in MiB; 0: the site's default")
    gpus: int = Field(0, ge=0, le=64, description="GPUs to request on each node")
    gres: str = Field("", description="Slurm's GRES for the GPUs; empty: gpu:N")
    time_min: float = Field(60.0, ge=1, le=43200, description="time limit in minutes; all of it "
                                                              "counts as used until the satellite "
                                                              "has ended")
    component: str = Field("satellite", pattern=_WORD,
                           description="component that the satellite's workers join")


class ElasticSettings(SettingsTable):
    """The fields of the table `[elastic]`. Nothing is requested while `max_nodes` is 0."""

    max_nodes: int = Field(0, ge=0, le=4096, description="largest number of satellite nodes at the "
                                                         "same time, requested ones included")
    max_core_hours: float = Field(
        0.0, ge=0, le=1e9, description="core-hours that all satellites together may use; a running "
                                       "satellite counts with its whole time limit")
    idle_release_s: float = Field(
        120.0, ge=0, le=1e9, description="idle seconds after which an allocation is given back; 0: "
                                         "never")
    give_back: Literal["satellites", "all"] = Field(
        "satellites", description="which idle nodes are given back; satellites: those that the "
                                  "broker requested; all: also het components and satellites that "
                                  "you submitted")
    min_nodes: int = Field(1, ge=1, le=1 << 20,
                           description="nodes that are kept even if they are idle")
    target_s: float = Field(60.0, ge=1, le=1e9,
                            description="seconds within which the queue should drain")
    grow_after_s: float = Field(
        10.0, ge=0, le=1e9, description="nodes are requested when the queue could not drain in "
                                        "time for so many seconds")
    arrive_s: float = Field(
        30.0, ge=0, le=1e9, description="expected seconds from a request to its worker, until they "
                                        "have been measured")
    patience_s: float = Field(
        600.0, ge=1, le=1e9, description="waiting seconds after which a request is withdrawn in "
                                         "favour of another kind")
    join_s: float = Field(
        120.0, ge=1, le=1e9, description="seconds after which a running satellite without a worker "
                                         "is given up")
    backoff_s: float = Field(
        60.0, ge=1, le=1e9, description="seconds without requests of a kind after a rejection; "
                                        "doubled after each further one")
    backoff_max_s: float = Field(
        3600.0, ge=1, le=1e9, description="upper bound of the pause `backoff_s` in seconds")
    asks_max: int = Field(4, ge=1, le=8, description="largest number of satellites requested "
                                                     "at once; the broker makes at most 8 Slurm "
                                                     "calls at the same time")
    setup: str = Field("", description="shell command that makes `tangram` callable on a "
                                       "satellite; empty: put the broker's own folder on PATH")
    scratch: str = Field("", description="value of the template's key `scratch`; empty: the key's "
                                         "default")
    satellites: tuple[Satellite, ...] = ()


Elastic = ElasticSettings  # the former name, an alias that the next release removes


def elastic(table: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
            ) -> ElasticSettings:
    """Checks the table and returns its settings.

    Args:
        table: the table as it was written.
        overrides: values from the command line, which win unless they are None.

    Raises:
        InvalidInput: a field is wrong; the text names it.
    """
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    try:
        settings = ElasticSettings(**{**table, **given})
    except ValidationError as error:
        field, said = first_error(error, ElasticSettings)
        raise InvalidInput(f"config field `elastic.{field}`: {said}") from None
    names = [s.name for s in settings.satellites]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise InvalidInput(f"config field `elastic.satellites`: two entries have the name "
                           f"{twice!r}; give each kind a name of its own")
    if settings.max_nodes and not settings.max_core_hours:
        raise InvalidInput("config field `elastic.max_core_hours`: say how many core-hours "
                           "satellites may use; without a bound none is requested")
    if settings.max_nodes and not settings.satellites:
        raise InvalidInput("config field `elastic.satellites`: max_nodes is "
                           f"{settings.max_nodes}, but there is no entry "
                           "[[elastic.satellites]] that says what to request")
    return settings


def alloc_policy(settings: ElasticSettings) -> AllocPolicy:
    """Returns the rules that the scheduler follows, made from the table."""
    def ns(seconds: float) -> int:
        return round(seconds * _S)

    return AllocPolicy(
        settings.max_nodes, round(settings.max_core_hours * 3600) * _S, settings.min_nodes,
        ns(settings.target_s), ns(settings.grow_after_s), ns(settings.arrive_s),
        ns(settings.idle_release_s), settings.give_back == "all", ns(settings.patience_s),
        ns(settings.join_s), ns(settings.backoff_s), ns(settings.backoff_max_s),
        settings.asks_max,
        tuple(SatelliteShape(s.name, s.partition, s.qos, s.account, s.nodes, s.cpus, s.mem_mib,
                             s.gpus, s.gres, ns(s.time_min * 60), s.component)
              for s in settings.satellites))
