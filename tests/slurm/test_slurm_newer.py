"""Other releases of Slurm than this machine's: the port's contract, and what else must work there.

`TANGRAM_TEST_SLURM=24.11,26.05` takes some of them only.
"""

from __future__ import annotations

import os
import re

import pytest
from helpers import other_system

RELEASES = [r for r in other_system.SYSTEMS
            if r in os.environ.get("TANGRAM_TEST_SLURM", ",".join(other_system.SYSTEMS)).split(",")]
pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(2400),
              pytest.mark.parametrize("release", RELEASES)]

CONTRACT = """
dc() { slurm/devcluster/devcluster "$@" --name newer; }
dc up --cpu-nodes 2 --gpu-nodes 2 --trainer-nodes 1 --cpus-per-node 16 \
    --conf-line SlurmdTimeout=300 || exit 1
home=/tmp/devcluster-newer/home
cp -r tangram_hpc tests/data/slurm_contract.py $home
export SLURM_CONF=/tmp/devcluster-newer/etc/slurm.conf
foreign=$(sbatch --parsable -n1 --mem=50 -p trainer -D / -o /dev/null --wrap 'sleep 600')
slurm/devcluster/devcluster exec --name newer --setenv CONTRACT_ADAPTER=cli \
    --setenv CONTRACT_FOREIGN=$foreign --setenv CONTRACT_ACCOUNTING=1 --setenv PYTHONPATH=$home \
    -- python3 -m pytest -v --durations=3 -rs -p no:cacheprovider --basetemp=tmp \\
    slurm_contract.py
status=$?
sbatch --version
dc down
exit $status
"""

# the package as its user would have it installed
TANGRAM = """
file=/usr/local/bin/tangram
printf '#!/bin/sh\nPYTHONPATH=/opt/tangram exec python3 -m tangram_hpc "$@"\n' >$file
chmod 755 $file
"""
HETJOB = TANGRAM + """
dc() { slurm/devcluster/devcluster "$@" --name newer; }
dc up --cpu-nodes 2 --gpu-nodes 2 --trainer-nodes 1 --cpus-per-node 16 \\
    --conf-line SlurmdTimeout=300 || exit 1
user() { slurm/devcluster/devcluster exec --name newer -- "$@"; }
home=/tmp/devcluster-newer/home
cp tests/data/trainer_actions.py tests/data/trainer_torch.py $home
user tangram template render hetjob --strict --output job.sbatch -o job_name=newer -o time=10 \\
    -o partition_cpu=cpu -o partition_gpu=gpu -o partition_trainer=trainer -o nodes_gpu=2 \\
    -o gres_gpu=gpu:2 -o mem_cpu=600 -o mem_gpu=600 -o ranks=2 $mpi \\
    -o setup='export PYTHONPATH=/opt/tangram TANGRAM_DEVICES=fake' \\
    -o trainer="$trainer" || exit 1
job=$(user sbatch --parsable job.sbatch)
for _ in $(seq 240); do
    [ -n "$(user squeue -h -j $job)" ] || break
    sleep 0.5
done
cat $home/newer-$job.out
for _ in $(seq 40); do
    user sacct -n -X -P -j $job -o State,Comment >$home/said
    [ "$(grep -c COMPLETED $home/said)" = 3 ] && break
    sleep 0.5
done
cat $home/said
echo "ROWS $(user tangram acct -j $job -P -n -o JobName,State | sort | uniq -c | tr -s ' ' '=')"
dc down
"""
# Three of its tests install by pip, and there is no network. A node in a network of its own would
# not see the cluster's folder there.
PLUGIN = """
TEST_CLUSTER=lab python3 -m pytest -v -p no:cacheprovider -rs tests/slurm/test_spank.py \\
    -k "not reaches_the_running_broker and not resize_in_a_job_step and not cannot_see_the_brokers"
"""


def run_on(release: str, script: str) -> str:
    """The output of a script in a system with this release of Slurm; the script must succeed."""
    try:
        done = other_system.run(script, 1200, other_system.SYSTEMS[release])
    except other_system.Unavailable as why:
        pytest.skip(str(why))
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_the_commands_adapter_keeps_the_contract_on_other_slurms(release: str) -> None:
    said = run_on(release, CONTRACT)
    assert re.search(rf"^slurm(-wlm)? {re.escape(release)}\.", said, re.MULTILINE), said
    assert re.search(r"\d+ passed in", said) and "skipped" not in said


def test_the_hetjob_template_runs_to_its_end(release: str) -> None:
    """Workers on two kinds of nodes; two ranks, with MPI and the gateway where Slurm has PMIx; its
    summary in sacct."""
    if other_system.SYSTEMS[release].pmix:
        words, trainer = "-o mpi=pmix", "trainer_actions.py 200"
        wanted, rows = "200 of 200 ok on 2 ranks by mpi", "=200=true|COMPLETED"
    else:
        words, trainer = "-o mpi=none -o gateway=off", "trainer_torch.py"
        wanted, rows = "2 ranks by socket: 328350", "=100=pow|COMPLETED"
    said = run_on(release, f"mpi='{words}' trainer='python3 {trainer}'\n{HETJOB}")
    assert wanted in said
    assert re.search(r"^COMPLETED\|tangram: actions=\d+ act_mean=", said, re.MULTILINE), said
    assert rows in said


def test_the_plugin_is_built_and_works(release: str) -> None:
    said = run_on(release, PLUGIN)
    ran = re.findall(r"^tests/\S+::(\w+)\S* (PASSED|SKIPPED)", said, re.MULTILINE)
    assert sum(word == "PASSED" for _, word in ran) >= 6, said
