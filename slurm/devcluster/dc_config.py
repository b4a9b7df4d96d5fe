"""Writes the files of one cluster from its record. Invariants of this module:

- every path in them is below the prefix, every daemon's port within the cluster's own span;
- it writes files and device nodes below the prefix and nothing else; it starts nothing;
- README.md says what the configuration does not imitate.

Ports from the base: +0 slurmctld, +1 slurmdbd, +10..+199 slurmds. srun takes what the kernel gives:
with an SrunPortRange, an srun over two het components starts a thread for each, both try the same
port first, and the one whose listen() comes second gives up (seen on 22.05.8: "all ports in range
exhausted").
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import socket
import stat
import subprocess

import dc_net
from dc_base import SAFE_PATH, Cluster, ClusterError

SPAN = 200
BASES = range(17000, 32000, SPAN)
FIRST_NODE = 10
MAX_NODES = 190

# PriorityCalcPeriod: only backfill starts het jobs, and it runs only after a change. On an idle
# cluster nothing changes at the time when a requeued job may start; new priorities are a change.
SLURM_CONF = """\
ClusterName={name}
SlurmctldHost={host}({address})
SlurmctldPort={base}
SlurmUser=slurm
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={prefix}/munge/munge.sock
CredType=cred/munge
StateSaveLocation={prefix}/state
SlurmdSpoolDir={prefix}/spool/%n
SlurmctldPidFile={prefix}/run/slurmctld.pid
SlurmdPidFile={prefix}/run/slurmd-%n.pid
SlurmctldLogFile={prefix}/log/slurmctld.log
SlurmdLogFile={prefix}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/{track}
TaskPlugin={tasks}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters={scheduler}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PriorityType=priority/multifactor
PriorityWeightPartition=1000
PriorityCalcPeriod=1
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=20
InactiveLimit=0
KillWait=5
MinJobAge=300
CompleteWait=0
OverTimeLimit=0
JobAcctGatherType=jobacct_gather/{gather}
JobAcctGatherFrequency=task=5
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
MaxStepCount=40000
MessageTimeout=20
RebootProgram=/bin/true
MailProg=/bin/true
"""

# version 1 even where both are mounted, because version 2 then has no controllers
CGROUP_CONF = """\
CgroupPlugin=cgroup/{version}
{more}ConstrainCores=yes
ConstrainRAMSpace=yes
"""

SCHEDULER = (
    "bf_interval=1,bf_continue,bf_window=1440,sched_min_interval=20000,batch_sched_delay=0,"
    "sched_interval=5,permit_job_expansion"
)

ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={dbd_port}
AccountingStoragePass={prefix}/munge/munge.sock
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment,job_env,job_script
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={prefix}/munge/munge.sock
DbdHost={host}
DbdAddr={address}
DbdPort={dbd_port}
SlurmUser=slurm
DebugLevel=info
LogFile={prefix}/log/slurmdbd.log
PidFile={prefix}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct
"""

# slurmdbd connects over the Unix socket as the user slurm: no password, no port.
DATABASE_INIT = """\
CREATE DATABASE IF NOT EXISTS slurm_acct;
CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED VIA unix_socket;
GRANT ALL ON slurm_acct.* TO 'slurm'@'localhost';
"""

ASSOCIATIONS = """\
Cluster - '{name}'
Parent - 'root'
User - 'root':DefaultAccount='root':AdminLevel='Administrator'
Account - 'dev':Description='dev':Organization='dev'
Parent - 'dev'
{users}
"""

USER_LINE = "User - '{}':DefaultAccount='dev'"
PARTITION = "PartitionName={} Nodes={} MaxTime=1-00:00:00 DefaultTime=10 State=UP DefMemPerCPU=100"


def names(cluster_name: str, kind: str, count: int) -> list[str]:
    return [f"{cluster_name}{kind}{i}" for i in range(1, count + 1)]


def node_port(c: Cluster, node: str) -> int:
    return c.base_port + FIRST_NODE + c.nodes.index(node)


def daemon_ports(c: Cluster) -> list[int]:
    return [c.base_port, c.base_port + 1, *(node_port(c, n) for n in c.nodes)]


def node_lines(c: Cluster) -> list[str]:
    kinds = {"cpu": c.cpu_nodes, "gpu": c.gpu_nodes, "trainer": c.trainer_nodes}
    shape = (
        f"CPUs={c.cpus_per_node} Boards=1 SocketsPerBoard=1 "
        f"CoresPerSocket={c.cpus_per_node // c.threads_per_core} "
        f"ThreadsPerCore={c.threads_per_core} RealMemory=4000"
    )
    lines = []
    for kind, nodes in kinds.items():
        gres = f" Gres=gpu:fake:{c.gpus_per_node}" if kind != "cpu" and c.gpus_per_node else ""
        lines += [
            f"NodeName={n} NodeHostname={n if c.netns else socket.gethostname()} "
            f"NodeAddr={dc_net.node_address(c, n)} Port={node_port(c, n)} {shape} "
            f"Feature={kind},{n}{gres} State=UNKNOWN"
            for n in nodes
        ]
    return lines


def partition_lines(c: Cluster) -> list[str]:
    lines = []
    for kind, nodes in (("cpu", c.cpu_nodes), ("gpu", c.gpu_nodes), ("trainer", c.trainer_nodes)):
        if nodes:
            default = "" if lines else " Default=YES"
            line = PARTITION.format(kind, ",".join(nodes))
            lines.append(f"{line} PriorityTier=10 PreemptMode=OFF{default}")
    if c.cpu_nodes + c.gpu_nodes:
        line = PARTITION.format("scav", ",".join(c.cpu_nodes + c.gpu_nodes))
        lines.append(f"{line} PriorityTier=1 PreemptMode=REQUEUE GraceTime=3")
    return lines


def slurm_conf(c: Cluster) -> str:
    fill = {
        "name": c.name, "prefix": c.prefix, "host": socket.gethostname(), "base": c.base_port,
        "dbd_port": c.base_port + 1, "scheduler": SCHEDULER,
        "track": "cgroup" if c.cgroups else "linuxproc",
        "tasks": "task/cgroup,task/affinity" if c.cgroups else "task/none",
        "gather": "cgroup" if c.cgroups else "linux", "address": dc_net.host_address(c),
    }  # fmt: skip
    text = SLURM_CONF.format(**fill)
    store = "AccountingStorageType=accounting_storage/none\n"
    text += ACCOUNTING.format(**fill) if c.dbd else store
    return text + "\n".join([*node_lines(c), *partition_lines(c), *c.conf_lines]) + "\n"


def associations(c: Cluster) -> str:
    lines = [USER_LINE.format(user.name) for user in c.users]
    return ASSOCIATIONS.format(name=c.name, users="\n".join(lines))


def gres_conf(c: Cluster) -> str:
    nodes, last = c.gpu_nodes + c.trainer_nodes, c.gpus_per_node - 1
    if not nodes or last < 0:
        return "AutoDetect=off\n"
    which = f"[0-{last}]" if last else "0"
    devices = f"{c.prefix}/dev/gpu{which}"
    return f"AutoDetect=off\nNodeName={','.join(nodes)} Name=gpu Type=fake File={devices}\n"


def slurm_version() -> tuple[int, int]:
    said = subprocess.run(
        ["slurmd", "-V"], env={"PATH": SAFE_PATH}, capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def put(path: str, text: str, owner: str = "root", mode: int = 0o644) -> None:
    who = pwd.getpwnam(owner)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
        os.fchown(out.fileno(), who.pw_uid, who.pw_gid)
        os.fchmod(out.fileno(), mode)


def make_dirs(c: Cluster) -> None:
    owners = {"etc": "root", "run": "slurm", "log": "root", "state": "slurm", "spool": "root",
              "dev": "root", "munge": "root"}  # fmt: skip
    if c.dbd:
        owners |= {"db": "mysql"}
    for name, owner in owners.items():
        path, who = c.root / name, pwd.getpwnam(owner)
        path.mkdir(mode=0o755)
        os.chown(path, who.pw_uid, who.pw_gid)
    for log in ["slurmctld.log"] + (["slurmdbd.log"] if c.dbd else []):
        put(f"{c.prefix}/log/{log}", "", "slurm")


def make_devices(c: Cluster) -> None:
    """Makes character devices without a driver (240 is 'local/experimental'): Slurm only counts
    them.
    """
    for k in range(c.gpus_per_node if c.gpu_nodes + c.trainer_nodes else 0):
        path = f"{c.prefix}/dev/gpu{k}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(240, k))
        except PermissionError as err:
            what = "cannot mknod a fake gpu: give this container CAP_MKNOD or --gpus-per-node 0"
            raise ClusterError(what) from err


def write_config(c: Cluster) -> None:
    fill = {"prefix": c.prefix, "host": socket.gethostname(), "dbd_port": c.base_port + 1,
            "address": dc_net.host_address(c)}  # fmt: skip
    etc = f"{c.prefix}/etc"
    only_v2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
    put(f"{etc}/slurm.conf", slurm_conf(c))
    put(f"{etc}/gres.conf", gres_conf(c))
    if c.plugins:
        put(f"{etc}/plugstack.conf", "\n".join(c.plugins) + "\n")
    if c.cgroups:
        put(f"{etc}/cgroup.conf", CGROUP_CONF.format(
            version="v2" if only_v2 else "v1", more="IgnoreSystemd=yes\n" if only_v2 else ""))
    elif (23, 0) <= slurm_version() < (24, 5):  # slurmd loads a plugin that it does not use
        put(f"{etc}/cgroup.conf", f"CgroupPlugin=cgroup/{'v2' if only_v2 else 'v1'}\n"
            "IgnoreSystemd=yes\n")
    elif slurm_version() >= (24, 5):
        put(f"{etc}/cgroup.conf", "CgroupPlugin=disabled\n")
    if c.dbd:
        put(f"{etc}/slurmdbd.conf", SLURMDBD_CONF.format(**fill), "slurm", 0o600)
        put(f"{etc}/database.sql", DATABASE_INIT, "mysql", 0o600)
        put(f"{etc}/associations", associations(c))
    key = secrets.token_hex(512)
    put(f"{c.prefix}/munge/munge.key", key, "root", 0o400)
