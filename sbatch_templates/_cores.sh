# ---- step sizes: --exact gives a step whole cores, and a core may be several CPUs -------------------
# A CPU is what Slurm counts: a hardware thread, where cores have several. If a step needs more cores
# than are free, Slurm lets it wait for the end of the other step and prints nothing. So the sizes are
# rounded here: the ranks get whole cores first, and of the remaining CPUs whole cores are lent.
lent_cpus=<CPUS_LENT> node_ranks=<TASKS_NODE> rank_cpus=<CPUS_PER_RANK>  # on each node
most=$(((<TASKS_TRAINER> + lenders - 1) / lenders))     # `sbatch --nodes` may have said another number
node_ranks=$((most > node_ranks ? most : node_ranks))
core=<THREADS_PER_CORE> core_node="${SLURMD_NODENAME:-this node}"  # CPUs of a core, used if Slurm does not tell
topology=$(scontrol -o show node "${SLURM_JOB_NODELIST:-${SLURMD_NODENAME:-}}" 2>/dev/null) || topology=""
largest=0                                               # of all nodes, as their steps have one size
while read -r line; do
    [[ $line =~ NodeName=([^\ ]+)" ".*CoresPerSocket=([1-9][0-9]*)" ".*CPUTot=([1-9][0-9]*)" ".*" "Sockets=([1-9][0-9]*) ]] || continue
    cpus=$((BASH_REMATCH[3] / (BASH_REMATCH[2] * BASH_REMATCH[4])))
    cpus=$((cpus > 0 ? cpus : 1))
    [ "$cpus" -le "$largest" ] || core_node="${BASH_REMATCH[1]}" largest="$cpus"
done <<< "$topology"
[ "$largest" -eq 0 ] || core="$largest"
if [ "${SLURM_THREADS_PER_CORE:-$core}" -lt "$core" ]; then  # --hint=nomultithread: the job counts whole cores itself
    core="$SLURM_THREADS_PER_CORE"
fi
node_cpus=$(tr ',' '\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | sed -n 1p)
step_cpus=$((node_ranks * rank_cpus))                   # ranks of one CPU share cores, others do not
held=$((rank_cpus > 1 ? node_ranks * ((rank_cpus + core - 1) / core * core)
                      : (node_ranks + core - 1) / core * core))
free=$(((node_cpus - held) / core * core))
lend_cpus=$(((lent_cpus + core - 1) / core * core))
lend_cpus=$((lend_cpus < free ? lend_cpus : free))
why="" remedy="submit the job with more nodes or CPUs, or render the script with fewer CPUs for the ranks"
if [ "$core" -gt 1 ]; then
    why="a core of $core_node is $core CPUs and a step has whole cores: "
    remedy="render the script with \`-o threads_per_core=$core\`, or with fewer CPUs for the ranks"
fi
if [ "$lend_cpus" -lt 1 ]; then
    echo "tangram: error: cpus_lent=$lent_cpus: ${why}the ranks need $held of the job's $node_cpus CPUs on each node:" \
        "nothing is left to lend; $remedy" >&2
    exit 2
elif [ "$lend_cpus" -ne "$lent_cpus" ] || [ "$held" -ne "$step_cpus" ]; then
    echo "tangram: ${why}of $node_cpus CPUs on each" \
        "node $lend_cpus are lent (cpus_lent=$lent_cpus) and the ranks hold $held (they asked for $step_cpus, and sacct counts these)"
fi
# Slurm may give a job more CPUs than it asked for, such as whole nodes. A setting `cpus` may lend them all the same.
if [ "$free" -gt "$lend_cpus" ] && [ "$node_cpus" -gt <CPUS_NODE> ] && [ -z "${SLURM_HINT:-}${SLURM_THREADS_PER_CORE:-}" ] &&
        tangram config 2>/dev/null | grep "^cpus  *0 " >/dev/null; then
    echo "tangram: Slurm gave the job $node_cpus CPUs on each node: $lend_cpus are lent, the ranks hold $held, and $((free - lend_cpus)) are" \
        "left over; \`-o cpus_lent=$free\` lends these too, and a larger \`cpus_per_rank\` gives them to the ranks"
fi
# srun leaves the job's memory in the environment of a step that has less, so the workers are told theirs
lend_mem=<MEM_LENT>
case "$lend_mem" in
    0) lend_mib="" ;;                                    # all of the job's
    *[Kk]) lend_mib=$((${lend_mem%?} / 1024)) ;;
    *[Gg]) lend_mib=$((${lend_mem%?} * 1024)) ;;
    *[Tt]) lend_mib=$((${lend_mem%?} * 1024 * 1024)) ;;
    *) lend_mib="${lend_mem%[Mm]}" ;;
esac
