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
    "Scheduler": "tangram_hpc.scheduler.scheduler:Scheduler",
    "make_placer": "tangram_hpc.scheduler.placement.placers.placer_registry:make_placer",
    "placers": "tangram_hpc.scheduler.placement.placers.placer_name:NAMES",
    "AnyEvent": "tangram_hpc.domain.event:AnyEvent",
    "read_journal": "tangram_hpc.storage.journal:read_journal",
    "next_journal": "tangram_hpc.storage.journal_segments:next_journal",
    "framed": "tangram_hpc.storage.record_file:framed",
    "info": "tangram_hpc.broker.queries.status:info",
    "nodes": "tangram_hpc.broker.queries.status:nodes",
    "services": "tangram_hpc.broker.queries.status:services",
    "pending": "tangram_hpc.broker.queries.status:pending",
    "load_config": "tangram_hpc.config.settings:load_config",
    "examples": "tangram_hpc.simulator.workload:EXAMPLES",
    "InvalidInput": "tangram_hpc.errors:InvalidInput",
}

# Decisions that are called otherwise now: new name to the name in the golden files.
_RENAMED_DECISIONS: dict[str, str] = {"ReplyToClient": "Reply"}

# Numbers and magic words of protocols and of files on disk.
CONSTANTS = {
    "protocol version": "tangram_hpc.protocol.message:PROTOCOL_VERSION",
    "largest inline payload": "tangram_hpc.protocol.message:INLINE_MAX",
    "largest frame": "tangram_hpc.protocol.frame:FRAME_MAX",
    "greeting": "tangram_hpc.protocol.auth:MAGIC",
    "length of a nonce": "tangram_hpc.protocol.auth:NONCE",
    "length of a proof": "tangram_hpc.protocol.auth:PROOF",
    "rank and gateway OPEN": "tangram_hpc.protocol.relay:OPEN",
    "rank and gateway DATA": "tangram_hpc.protocol.relay:DATA",
    "rank and gateway CLOSE": "tangram_hpc.protocol.relay:CLOSE",
    "rank and gateway LEAVE": "tangram_hpc.protocol.relay:LEAVE",
    "rank and gateway BEAT": "tangram_hpc.protocol.relay:BEAT",
    "rank and gateway GONE": "tangram_hpc.protocol.relay:BROKER_CLOSED",
    "rank and gateway PART": "tangram_hpc.protocol.relay:PART",
    "rank and gateway END": "tangram_hpc.protocol.relay:END",
    "journal version": "tangram_hpc.domain.event:JOURNAL_VERSION",
    "journal magic": "tangram_hpc.storage.journal_format:MAGIC",
    "older journal that is read": "tangram_hpc.storage.journal_format:READ_TOO",
    "journal modes": "tangram_hpc.storage.journal:MODES",
    "spool magic": "tangram_hpc.storage.spool:MAGIC",
    "access file format": "tangram_hpc.storage.access:FORMAT",
    "identity file format": "tangram_hpc.storage.identity:FORMAT",
    "cost back end format": "tangram_hpc.libra.live.plan_costs:FORMAT",
    "records format": "tangram_hpc.simulator.run_records:FORMAT",
    "workload format": "tangram_hpc.simulator.workload:FORMAT",
    "rl scenario format": "tangram_hpc.libra.simulation.rl_scenario:FORMAT",
    "learned trees format": "tangram_hpc.scheduler.routing.cmlfq:FORMAT",
}

# Files and tables that people write: the label that users know, and the model that checks it.
SETTINGS = {
    "tangram.toml": "tangram_hpc.config.settings:Config",
    "[elastic]": "tangram_hpc.config.allocations:ElasticSettings",
    "[[elastic.satellites]]": "tangram_hpc.config.allocations:Satellite",
    "[endpoints.NAME]": "tangram_hpc.config.endpoints:Quota",
    "[rollouts.NAME]": "tangram_hpc.config.rollouts:RolloutPoolSettings",
    "[[rollouts.NAME.buckets]]": "tangram_hpc.config.rollouts:Bucket",
    "[services.NAME] torch": "tangram_hpc.config.services:TorchService",
    "[services.NAME] http": "tangram_hpc.config.services:HttpService",
    "[services.NAME] vllm": "tangram_hpc.config.services:VllmService",
    "[services.NAME] sglang": "tangram_hpc.config.services:SglangService",
    "[services.NAME] fake": "tangram_hpc.config.services:FakeService",
    "[planner]": "tangram_hpc.config.planner.planner_settings:PlannerSettings",
    "model file": "tangram_hpc.config.planner.files:ModelFile",
    "model file [training]": "tangram_hpc.config.planner.files:TrainingTable",
    "model file [rollout]": "tangram_hpc.config.planner.files:RolloutTable",
    "model file [lengths]": "tangram_hpc.config.planner.files:LengthsTable",
    "hardware file": "tangram_hpc.config.planner.files:HardwareFile",
    "lengths line": "tangram_hpc.config.planner.files:_Length",
    "measured line": "tangram_hpc.config.planner.files:_Measured",
    "plan file": "tangram_hpc.config.planner.plan_file:PlanFile",
    "workload line": "tangram_hpc.simulator.workload:WorkloadTrajectory",
    "workload turn": "tangram_hpc.simulator.workload:WorkloadTurn",
    "workload action": "tangram_hpc.simulator.workload:WorkAction",
    "cluster file": "tangram_hpc.simulator.workload:Cluster",
    "cluster file nodes": "tangram_hpc.simulator.workload:ClusterNode",
    "cluster file services": "tangram_hpc.simulator.workload:ClusterService",
    "cluster file endpoints": "tangram_hpc.simulator.workload:ClusterEndpoint",
    "elastic scenario [slurm]": "tangram_hpc.simulator.elastic_runs:ModelledQueue",
}

# Modules that users import or run, besides the package itself. Their files are read, not imported:
# some need torch.
PUBLIC_MODULES = (
    "tangram_hpc.errors", "tangram_hpc.training", "tangram_hpc.hooks.reference.__main__",
    "tangram_hpc.hooks.reference.reference_run", "tangram_hpc.hooks.reference.reference_task",
    "tangram_hpc.hooks.reference.reference_planning", "tangram_hpc.hooks.trl_tools",
    "tangram_hpc.hooks.verl.reward_functions", "tangram_hpc.hooks.slime_functions",
    "tangram_hpc.hooks.openrlhf_reward",
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
