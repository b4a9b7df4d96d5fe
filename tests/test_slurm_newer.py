"""A newer Slurm than this machine's: the port's contract, and what else must work there."""

from __future__ import annotations

import re

import newer_slurm
import pytest

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(2400)]

CONTRACT = """
dc() { slurm/devcluster/devcluster "$@" --name newer; }
dc up --cpu-nodes 2 --gpu-nodes 2 --trainer-nodes 1 --cpus-per-node 16 \
    --conf-line SlurmdTimeout=300 || exit 1
home=/tmp/devcluster-newer/home
cp -r tangram_hpc tests/data/slurm_contract.py $home
export SLURM_CONF=/tmp/devcluster-newer/etc/slurm.conf
foreign=$(sbatch --parsable -n1 --mem=50 -p trainer -D / -o /dev/null --wrap 'sleep 600')
slurm/devcluster/devcluster exec --name newer --setenv CONTRACT_FILLING=cli \
    --setenv CONTRACT_FOREIGN=$foreign --setenv CONTRACT_ACCOUNTING=1 --setenv PYTHONPATH=$home \
    -- python3 -m pytest -v --durations=3 -rs -p no:cacheprovider slurm_contract.py
status=$?
sbatch --version
dc down
exit $status
"""


def there(script: str) -> str:
    """What it prints, in an environment with a newer Slurm; it has not failed."""
    try:
        done = newer_slurm.run(script, 1200)
    except newer_slurm.Unavailable as why:
        pytest.skip(str(why))
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_commands_keep_the_contract() -> None:
    said = there(CONTRACT)
    release = re.search(r"^slurm(?:-wlm)? (\d+)\.(\d+)", said, re.MULTILINE)
    assert release and (int(release[1]), int(release[2])) >= (24, 11), said
    assert re.search(r"\d+ passed in", said) and "skipped" not in said
