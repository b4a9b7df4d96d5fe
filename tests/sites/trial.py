"""One row of the matrix: a cluster that is configured so, and an ordinary job that runs on it.

The job is that of a user who knows nothing of the row: a template's defaults, partitions and sizes.
What is expected of it is the same everywhere.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from helpers.slurm_site import Site

from sites.axes import Row

ACTIONS = 60
SIZES = {
    "hetjob": {"ranks": "2"},
    "homogeneous": {"ranks": "2", "partition": "gpu", "cpus_lent": "4", "gres": "gpu:2",
                    "gres_lent": "gpu:1", "gres_trainer": "gpu:1", "mem": "1500",
                    "mem_lent": "1000", "mem_trainer": "500"},
    "single-node": {"ranks": "2", "partition": "cpu", "cpus_lent": "6", "mem": "1800"}}
# nodes of two CPUs have no room for a gateway beside ranks and worker
ON_SMALL_NODES = {
    "hetjob": {"cpus_cpu": "2", "cpus_gpu": "2", "nodes_trainer": "2"},
    "homogeneous": {"cpus_lent": "1", "nodes": "2", "gateway": "off"},
    "single-node": {"cpus_lent": "1", "ranks": "1", "gateway": "off"}}


def is_small(row: Row) -> bool:
    """Whether Slurm binds to the real CPUs of this machine, of which there may be two only."""
    return "cgroup" in row["TaskPlugin"]


def cluster_of(row: Row) -> dict[str, Any]:
    """Returns the options of `running_cluster` for a row."""
    tasks = ",".join(f"task/{name}" for name in row["TaskPlugin"].split(","))
    lines = [f"TaskPlugin={tasks}", f"ProctrackType=proctrack/{row['ProctrackType']}",
             f"SelectTypeParameters={row['SelectTypeParameters']}", "SlurmdTimeout=300",
             f"JobAcctGatherType=jobacct_gather/{row['JobAcctGatherType']}"]
    lines += [f"PrologFlags={row['PrologFlags']}"] * (row["PrologFlags"] != "none")
    lines += [f"PrivateData={row['PrivateData']}"] * (row["PrivateData"] != "none")
    return {"cpu_nodes": 2, "gpu_nodes": 2, "trainer_nodes": 2 if is_small(row) else 1,
            "cpus_per_node": 2 if is_small(row) else 16,
            "threads_per_core": int(row["threads a core"]), "no_dbd": row["slurmdbd"] == "no",
            "netns": row["/tmp"] != "of the host", "debian_hosts": row["/tmp"] != "of the host",
            "cgroups": any("cgroup" in row[axis] for axis in
                           ("TaskPlugin", "ProctrackType", "JobAcctGatherType")),
            "conf_line": lines}


def run_job(site: Site, row: Row) -> None:
    """Runs the job, and checks how it ended, its records and what it left."""
    name = "site" + row["template"].replace("-", "")
    keys = SIZES[row["template"]] | (ON_SMALL_NODES[row["template"]] if is_small(row) else {})
    keys |= {"mpi": row["mpi"]} | ({"gateway": "off"} if row["mpi"] == "none" else {})
    ranks = int(keys.pop("ranks"))
    if keys.get("gateway") == "off":
        trainer, actions = "python trainer_torch.py", 100
        wanted = f"{ranks} ranks by socket: 328350"
    else:
        trainer, actions = f"python trainer_actions.py {ACTIONS}", ACTIONS
        wanted = f"{ACTIONS} of {ACTIONS} ok on {ranks} ranks by mpi"
    job = site.sbatch(name, trainer, "trainer_torch.py", "trainer_actions.py", ranks=ranks,
                      template=row["template"], **keys)
    said = site.finish(name, job, 150)
    assert wanted in said, said
    assert "error" not in said.lower(), said
    check_records(site, job, actions)
    left = site.left_behind if row["/tmp"] == "of the host" else site.left_on_nodes
    site.until(lambda: not left(), "nothing to be left", 30, lambda: str(left()))


def check_records(site: Site, job: str, actions: int) -> None:
    """Each action is accounted once, has ended well, and held CPUs of a node."""
    rows = site.acct(job)
    ended = Counter(row["state"] for row in rows)
    assert set(ended) == {"COMPLETED"}, ended
    mine = [row for row in rows if row["name"] in ("true", "pow")]
    assert len(mine) == actions
    assert all(row["node"] and row["cpu_held_ns"] > 0 for row in mine), mine
