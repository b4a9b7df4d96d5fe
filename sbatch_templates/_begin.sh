set -euo pipefail

# ---- a script with placeholders left ends at once ---------------------------------------------------
left=$(grep -v '^#[: ]' "$0" | grep -Eo '<[A-Z][A-Z_]+>' | sort -u | tr '\n' ' ') || true
if [ -n "$left" ]; then
    echo "tangram: error: placeholders are left in this script: ${left% }; fill them in with" \
        "\`tangram template render <TEMPLATE> -o KEY=VALUE\`" >&2
    exit 2
fi

# ---- a requeued job writes a file of its own: NAME-JOB.1.out, then NAME-JOB.2.out ... ----------------
start="${SLURM_RESTART_COUNT:-0}"
out=$(readlink "/proc/$$/fd/1")
if [ "$start" -gt 0 ] && [ -f "$out" ]; then
    exec >> "${out%.out}.$start.out" 2>&1
fi

# ---- environment: every step inherits it ------------------------------------------------------------
trap 'echo "tangram: error: setup: \`$BASH_COMMAND\` ended with status $?" >&2' ERR
<SETUP>
trap - ERR
settings="<CONFIG>"
if [ -n "$settings" ]; then
    TANGRAM_CONFIG=$(realpath -- "$settings")           # relative to the folder where the job was submitted
    export TANGRAM_CONFIG
fi
umask 077
export SLURM_EXPORT_ENV=ALL                             # overrides any --export of the submission
unset SLURM_NTASKS_PER_NODE                             # the job's value; each step gives its own
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then               # an older Slurm does not set this variable
    ends=$(squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null | sed -n 1p) || ends=""
    ends=$(date -d "${ends:-unknown}" +%s 2>/dev/null) || ends=""
    export SLURM_JOB_END_TIME="$ends"
fi
if ! command -v tangram >/dev/null; then
    echo "tangram: error: no \`tangram\` on PATH; the key \`setup\` names the command that puts it there" >&2
    exit 2
fi
