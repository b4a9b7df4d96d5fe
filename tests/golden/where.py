"""Where the collectors find what they need: the one file to edit when code moves.

Everything else that is collected is found by walking the package, so that its place does not
matter. `renames.toml` is for what users see; this table is only for this folder.
"""

from __future__ import annotations

import importlib
from typing import Any

PACKAGE = "tangram_hpc"

# What the collectors call, by the name that they use for it: "module:attribute".
_PLACES = {
    "main": "tangram_hpc.cli:main",
    "parser": "tangram_hpc.cli:parser",
    "Scheduler": "tangram_hpc.core.scheduler:Scheduler",
    "make_placer": "tangram_hpc.core.placers.registry:make_placer",
    "placers": "tangram_hpc.core.placers.registry:NAMES",
    "AnyEvent": "tangram_hpc.domain.event:AnyEvent",
    "read_journal": "tangram_hpc.backends.journal:read_journal",
    "next_journal": "tangram_hpc.backends.journal:next_journal",
    "framed": "tangram_hpc.backends.records:framed",
    "info": "tangram_hpc.broker.status:info",
    "nodes": "tangram_hpc.broker.status:nodes",
    "services": "tangram_hpc.broker.status:services",
    "pending": "tangram_hpc.broker.status:pending",
    "load_config": "tangram_hpc.config:load_config",
    "examples": "tangram_hpc.sim.workload:EXAMPLES",
    "InvalidInput": "tangram_hpc.errors:InvalidInput",
}

# Decisions that are called otherwise now: new name to the name in the golden files.
_RENAMED_DECISIONS: dict[str, str] = {}

# Numbers and magic words of protocols and of files on disk.
CONSTANTS = {
    "protocol version": "tangram_hpc.wire.message:PROTOCOL_VERSION",
    "largest inline payload": "tangram_hpc.wire.message:INLINE_MAX",
    "largest frame": "tangram_hpc.wire.frame:FRAME_MAX",
    "greeting": "tangram_hpc.wire.auth:MAGIC",
    "length of a nonce": "tangram_hpc.wire.auth:NONCE",
    "length of a proof": "tangram_hpc.wire.auth:PROOF",
    "rank and gateway OPEN": "tangram_hpc.wire.relay:OPEN",
    "rank and gateway DATA": "tangram_hpc.wire.relay:DATA",
    "rank and gateway CLOSE": "tangram_hpc.wire.relay:CLOSE",
    "rank and gateway LEAVE": "tangram_hpc.wire.relay:LEAVE",
    "rank and gateway BEAT": "tangram_hpc.wire.relay:BEAT",
    "rank and gateway GONE": "tangram_hpc.wire.relay:GONE",
    "rank and gateway PART": "tangram_hpc.wire.relay:PART",
    "rank and gateway END": "tangram_hpc.wire.relay:END",
    "journal version": "tangram_hpc.domain.event:JOURNAL_VERSION",
    "journal magic": "tangram_hpc.backends.journal:MAGIC",
    "older journal that is read": "tangram_hpc.backends.journal:_READ_TOO",
    "journal modes": "tangram_hpc.backends.journal:MODES",
    "spool magic": "tangram_hpc.backends.spool:MAGIC",
    "access file format": "tangram_hpc.backends.access:FORMAT",
    "identity file format": "tangram_hpc.backends.identity:FORMAT",
    "cost back end format": "tangram_hpc.backends.plan_costs:FORMAT",
    "records format": "tangram_hpc.sim.records:FORMAT",
    "workload format": "tangram_hpc.sim.workload:FORMAT",
    "rl scenario format": "tangram_hpc.sim.rl_scenario:FORMAT",
    "learned trees format": "tangram_hpc.core.cmlfq:FORMAT",
}

# Files and tables that people write: the label that users know, and the model that checks it.
SETTINGS = {
    "tangram.toml": "tangram_hpc.config:Config",
    "[elastic]": "tangram_hpc.allocations:Elastic",
    "[[elastic.satellites]]": "tangram_hpc.allocations:Satellite",
    "[endpoints.NAME]": "tangram_hpc.endpoints:Quota",
    "[rollouts.NAME]": "tangram_hpc.rollouts:Rollouts",
    "[[rollouts.NAME.buckets]]": "tangram_hpc.rollouts:Bucket",
    "[services.NAME] torch": "tangram_hpc.services:TorchService",
    "[services.NAME] http": "tangram_hpc.services:HttpService",
    "[services.NAME] vllm": "tangram_hpc.services:VllmService",
    "[services.NAME] sglang": "tangram_hpc.services:SglangService",
    "[services.NAME] fake": "tangram_hpc.services:FakeService",
    "[planner]": "tangram_hpc.planning.settings:PlannerSettings",
    "model file": "tangram_hpc.planning.files:ModelFile",
    "model file [training]": "tangram_hpc.planning.files:TrainingTable",
    "model file [rollout]": "tangram_hpc.planning.files:RolloutTable",
    "model file [lengths]": "tangram_hpc.planning.files:LengthsTable",
    "hardware file": "tangram_hpc.planning.files:HardwareFile",
    "lengths line": "tangram_hpc.planning.files:_Length",
    "measured line": "tangram_hpc.planning.files:_Measured",
    "plan file": "tangram_hpc.planning.plan_file:PlanFile",
    "workload line": "tangram_hpc.sim.workload:Trajectory",
    "workload turn": "tangram_hpc.sim.workload:Turn",
    "workload action": "tangram_hpc.sim.workload:WorkAction",
    "cluster file": "tangram_hpc.sim.workload:Cluster",
    "cluster file nodes": "tangram_hpc.sim.workload:ClusterNode",
    "cluster file services": "tangram_hpc.sim.workload:ClusterService",
    "cluster file endpoints": "tangram_hpc.sim.workload:ClusterEndpoint",
    "elastic scenario [slurm]": "tangram_hpc.sim.elastic_runs:ModelledQueue",
}

# Modules that users import or run, besides the package itself. Their files are read, not imported:
# some need torch.
PUBLIC_MODULES = (
    "tangram_hpc.errors", "tangram_hpc.hooks.reference_trainer",
    "tangram_hpc.hooks.reference_run", "tangram_hpc.hooks.reference_task",
    "tangram_hpc.hooks.reference_planning",
)

# Classes of the package's face that users get from a method and never make themselves.
NOT_MADE_BY_USERS = ("Client", "Session", "Future", "Endpoint", "ExecResult", "Details", "Routed")


def resolve(place: str) -> Any:
    """The object at `module:attribute`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def find(name: str) -> Any:
    """What the collectors call by this name."""
    return resolve(_PLACES[name])


def swap(name: str, value: Any) -> Any:
    """Puts another object where `find` looks, for a test that spoils it; returns what was there."""
    module, _, attribute = _PLACES[name].partition(":")
    owner = importlib.import_module(module)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    return before


def old_name(name: str) -> str:
    """The name that a decision's class had when the golden files were made."""
    return _RENAMED_DECISIONS.get(name, name)
