#!/bin/sh
# Writes the batch script of a training run as a het job: broker and workers on CPU nodes, one
# trainer rank on its own node. Run it where .venv-trl is (`make trl`), in a checkout on a file
# system that all nodes see. Its arguments go to run.py:
#
#     bench/trl_run/het_job.sh --steps 50 --seed 1 > job.sbatch && sbatch job.sbatch
#
# Variables of the environment say what the site calls its partitions. VENV names another virtual
# environment than .venv-trl. TEMPLATE_OPTIONS holds further options of the template, such as
# "-o requeues=9": with --checkpoints FOLDER a requeued job goes on after its last whole step.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
venv="${VENV:-$here/.venv-trl}"
exec "$venv/bin/tangram" template render hetjob \
    -o job_name=trl-run -o time="${TIME:-01:00:00}" \
    -o partition_cpu="${PARTITION_CPU:-cpu}" -o partition_gpu="${PARTITION_GPU:-gpu}" \
    -o partition_trainer="${PARTITION_TRAINER:-trainer}" -o cpus_cpu="${CPUS_CPU:-8}" \
    -o cpus_gpu="${CPUS_GPU:-2}" -o gres_gpu="${GRES_GPU:-}" \
    -o ranks=1 -o gateway=off -o mpi=none -o cpus_per_rank="${CPUS_PER_RANK:-2}" \
    -o setup="export PATH='$venv/bin':\"\$PATH\"" \
    -o trainer="python '$here/bench/trl_run/run.py' --broker job --mode broker-all --tool-cpus 1-8 --out trl-run.json $*" \
    ${TEMPLATE_OPTIONS:-} --output "${OUTPUT:-/dev/stdout}"
