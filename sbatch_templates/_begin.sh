set -euo pipefail
again=""
trap 'again=yes' USR1                                   # a warning that comes before `finish` can be called

# ---- a script with placeholders left ends at once ---------------------------------------------------
keys=$(sed -n 's/^#: \([a-z_]*\)[= ].*/\1/p' "$0" | tr 'a-z\n' 'A-Z|')  # a trainer may use other words in such brackets
left=$(grep -v '^#[: ]' "$0" | grep -Eo "<(${keys:-[A-Z][A-Z_]+|}TASKS_TRAINER|TASKS_NODE|RANKS_NODE|CPUS_NODE)>" | sort -u |
    tr '\n' ' ') || true
if [ -n "$left" ]; then
    echo "tangram: error: placeholders are left in this script: ${left% }; fill them in with" \
        "\`tangram template render <TEMPLATE> -o KEY=VALUE\`" >&2
    exit 2
fi

# ---- what another job left in the environment, if this script was submitted from inside that job -----
# sbatch hands its whole environment on, and Slurm replaces only the variables that it sets for this job.
forget() { for name in $(compgen -e | grep -E "$1"); do unset "$name"; done; }
if [ -n "${TANGRAM_ACCESS:-}" ]; then                   # by a trainer: its broker, and its place in its world
    forget '^(TANGRAM_(ACCESS|GATEWAY|WORLD_SIZE)|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)$'
fi
if [ "${SLURM_JOB_ID_HET_GROUP_0:-}" != "${SLURM_JOB_ID:-}" ]; then
    forget '^SLURM_(.*_)?(HET|PACK)_(SIZE|GROUP_[0-9]+)$'  # srun would look for the components
fi
if [ -n "${SLURM_STEP_ID:-}" ]; then                    # a step's cores and MPI: this script is in no step
    forget '^(SLURM_STEP|SLURM_CPU_BIND|PMI_|PMIX_[^M]|OMPI_COMM_WORLD_)'
fi
commands_as_written() { # without options that a user has set for these commands, as in ~/.bashrc or by a module
    # the last three are of srun: with them job steps would end before the job, or would never begin
    forget '^((SQUEUE|SINFO|SCONTROL|SCANCEL)_.*|SLURM_(CLUSTERS|CONSTRAINT|EXCLUSIVE|TIMELIMIT))$'
    forget '^SLURM_(NO_KILL|RESV_PORTS)$'                # srun refuses a step with them
    forget '^SLURM_(REMOTE_CWD|WORKING_DIR|BCAST|STD(IN|OUT|ERR)MODE)$'  # move a step or hide its output
    # srun takes these as options of each step; an interactive job leaves them behind
    forget '^SLURM_(NTASKS_PER_(NODE|GPU|TRES)|OVERCOMMIT|GPUS(_PER_(NODE|SOCKET|TASK))?|CPUS_PER_GPU|MEM_PER_GPU)$'
    forget '^SRUN_'                                      # each step has its CPUs, this environment and its streams
    # and these in a job that asked for them, but in another one they make its steps too large
    if [ -n "${SLURM_HINT:-}${SLURM_THREADS_PER_CORE:-}${SLURM_MEM_PER_CPU:+${SLURM_MEM_PER_NODE:-}}" ]; then
        asked="${asked:-$(timeout 20 scontrol -o show job "${SLURM_JOB_ID:-}" 2>/dev/null | sed -n 1p)}" || asked=""
        if [[ $asked =~ " ReqB:S:C:T="[^\ ]*":* " ]]; then  # its cores give all their threads
            unset SLURM_THREADS_PER_CORE
            [ "${SLURM_HINT:-}" = multithread ] || unset SLURM_HINT
        fi
        [[ ! $asked =~ " MinMemoryNode=" ]] || unset SLURM_MEM_PER_CPU
        [[ ! $asked =~ " MinMemoryCPU=" ]] || unset SLURM_MEM_PER_NODE
    fi
}
asked=""
commands_as_written
if [ -n "${tangram_asked_end:-}" ]; then                # that job's script had asked for its own end
    unset SLURM_JOB_END_TIME
fi
# the job's number for Slurm's commands: the last element of an array has the number of the whole array
export slurm_job="${SLURM_JOB_ID:-}"
if [ "${SLURM_ARRAY_JOB_ID:-none}" = "$slurm_job" ]; then
    slurm_job+="_$SLURM_ARRAY_TASK_ID"
fi
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then          # of this job, or of the other one
    starts=$(SLURM_TIME_FORMAT=standard timeout 20 scontrol -o show job "$slurm_job" 2>/dev/null | sed -n 1p) || starts=""
    if [[ $starts =~ " Restarts="([0-9]+) ]]; then
        export SLURM_RESTART_COUNT="${BASH_REMATCH[1]}"
    fi
fi

requeue() {             # whether Slurm puts this job back; a controller that is restarted is asked again for 10 minutes
    local said end=$((SECONDS + 600))
    until said=$(scontrol requeue "$slurm_job" 2>&1); do  # by itself scontrol gives up after about 20 s
        [[ ! $said =~ "pending execution" ]] || return 0 # said of a component that waits already; the others then do too
        if [[ ! $said =~ contact|Unexpected|timed|standby ]] || [ "$SECONDS" -ge "$end" ]; then
            [[ ! $said =~ disabled ]] || said+=' (`#SBATCH --requeue` allows it)'
            echo "tangram: job $slurm_job is over without another start: $said" >&2
            return 1
        fi
        sleep 1
    done
}

# ---- a requeued job writes a file of its own: NAME-JOB.1.out, then NAME-JOB.2.out ... ----------------
start="${SLURM_RESTART_COUNT:-0}"
out=$(readlink "/proc/$$/fd/1")
if [ "$start" -gt 0 ] && [ -f "$out" ]; then
    exec >> "${out%.out}.$start.out" 2>&1
fi

# ---- environment: every step inherits it ------------------------------------------------------------
[ -n "${HOME:-}" ] || { unset HOME; export HOME=~; }     # as from slurmrestd; bash asks the password database
trap 'echo "tangram: error: setup: \`$BASH_COMMAND\` ended with status $?" >&2' ERR
set +u                                                  # activation scripts read variables that nobody set
<SETUP>
setup_status=$?                                         # bash goes on when a command before && has failed
[ "$setup_status" -eq 0 ] || echo "tangram: warning: setup: a command before \`&&\` ended with status $setup_status, and those" \
    "after it were not run" >&2
set -u
trap - ERR
commands_as_written
settings="<CONFIG>"
if [ -n "$settings" ]; then
    TANGRAM_CONFIG=$(realpath -- "$settings")           # relative to the folder where the job was submitted
    export TANGRAM_CONFIG
fi
own_umask=$(umask)                                      # for the trainer: its files may be for others
umask 077
export SLURM_EXPORT_ENV=ALL                             # overrides any --export of the submission
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then               # an older Slurm does not set this variable
    ends=$(SLURM_TIME_FORMAT=standard squeue -h -j "$slurm_job" -o %e 2>/dev/null | sed -n 1p) || ends=""
    [ "$ends" != NONE ] || ends="+365 days"              # no limit: a year, as Slurm counts it and a newer one sets
    ends=$(date -d "${ends:-unknown}" +%s 2>/dev/null) || ends=""
    export SLURM_JOB_END_TIME="$ends" tangram_asked_end=yes
fi
if ! command -v tangram >/dev/null; then
    echo "tangram: error: no \`tangram\` on PATH; the key \`setup\` names the command that puts it there" >&2
    exit 2
fi
