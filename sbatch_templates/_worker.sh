# ---- workers: one long job step for each component; actions never become steps ----------------------
# On scancel srun kills its tasks at once, so a worker may have no time to clean up. Slurm's task epilog
# then removes the scratch folder, but Slurm ends it after about 5 s. What is left of a large folder is
# removed by the site's epilog, or by the user's next worker on the node. The folder's name is random:
# in a folder where everybody may write, another user who knew it could make it first and so block the
# worker. If Slurm takes the first node from the job, as when somebody sets it down, it kills the broker
# there and the site's epilog does not run: the task epilog then removes the broker's folder too.
export tangram_tag="job$SLURM_JOB_ID-$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')"
export tangram_first="${SLURMD_NODENAME:-}" tangram_folder="$folder"
epilog="$folder/epilog.$SLURM_JOB_ID"
cat > "$epilog" <<'END_OF_EPILOG'
#!/bin/bash
scratch="<SCRATCH>/tangram-node-$tangram_tag-$SLURMD_NODENAME"
rm -rf "$scratch" 2>/dev/null || tangram worker --remove="$scratch"  # rm cannot: files of an image's users
broker=$(sed -n 's|.*"unix:\(/[^"\\]*/tangram-broker-[^"\\/]*\)/broker\.sock".*|\1|p' "$tangram_folder/access.json" 2>/dev/null)
for ((n = 0; n < 20; n++)); do                          # this is the broker's node; while it lives it holds the lock
    [ -d "$broker" ] && ! flock --nonblock "$broker/.alive" rm -rf "$broker" 2>/dev/null || break
    sleep 0.1                                           # slurmstepd blocks SIGALRM, so flock --timeout never ends
done
END_OF_EPILOG
chmod 700 "$epilog"
worker='export TANGRAM_SCRATCH="<SCRATCH>/tangram-node-$tangram_tag-$SLURMD_NODENAME"
    trap "rmdir \"\$TANGRAM_SCRATCH\" 2>/dev/null" EXIT    # Slurm may kill the epilog at once
    # Slurm may give a job more CPUs than it asked for, such as whole nodes; a setting `cpus` may lend them all the same
    had="SLURM_JOB_CPUS_PER_NODE${3:+_HET_GROUP_$3}"
    had=$(tr , "\n" <<< "${!had:-0}" | sed "s/(.*//" | sort -n | sed -n 1p)  # on the smallest node
    if [ -n "${tangram_key:-}" ] && [ "$SLURM_PROCID" -eq 0 ] && [ "$had" -gt "${SLURM_CPUS_ON_NODE:-$had}" ] &&
            [ -z "${SLURM_HINT:-}${SLURM_THREADS_PER_CORE:-}" ] && tangram config 2>/dev/null | grep "^cpus  *0 " >/dev/null; then
        echo "tangram: Slurm gave component $1 $had CPUs on each node: $SLURM_CPUS_ON_NODE are lent, and" \
            "$((had - SLURM_CPUS_ON_NODE)) are left over; $tangram_key=$had lends these too"
    fi
    told="" starts=0 status=143
    trap "told=yes" TERM                                 # this shell stays; the worker gets the signals too
    trap : INT USR1 USR2 HUP                             # scancel --signal=USR1 without --batch: to every step
    while [ -z "$told" ]; do
        [ -O "$TANGRAM_SCRATCH" ] && [ ! -L "$TANGRAM_SCRATCH" ] || mkdir "$TANGRAM_SCRATCH" || exit
        since=$SECONDS
        tangram worker --component "$1" "${@:2}" && exit
        status=$?
        # 70: an internal failure. Above 128: a signal; with 143 the worker was told to leave.
        [ "$status" -eq 70 ] || [ "$status" -gt 128 ] || break
        [ "$status" -ne 143 ] && [ -z "$told" ] || break
        sleep 1                                          # if the whole step is killed, it ends here
        [ -z "$told" ] && grep -q "\"ended\": \"\"" "$tangram_folder/access.json" || break
        [ "$((SECONDS - since))" -le 600 ] || starts=0   # it lasted long enough
        said="tangram: the worker on $SLURMD_NODENAME ended with status $status and is"
        if [ "$((starts += 1))" -gt 5 ]; then
            echo "$said not started again, as each of 5 more starts lasted less than 10 minutes" >&2
            break
        fi
        echo "$said started again ($starts of 5 times)" >&2
    done
    # 3: the host of the broker is out of reach. If that node is lost, --no-kill keeps the job until
    # its time limit, but without this script. So one of the workers requeues the job, or ends it.
    [ "$status" -eq 3 ] && [ "$TANGRAM_JOB" = "$SLURM_JOB_ID" ] || exit "$status"
    sleep "$((SLURM_PROCID * 15))"
    for ((n = 0; n < 30; n++)); do
        grep -q "\"ended\": \"\"" "$tangram_folder/access.json" || exit "$status"
        state="$(sinfo -h -N -n "$tangram_first" -o %T)"
        nodes="$(squeue -h -j "$slurm_job" -o %N | paste -sd ,)"  # without nodes that Slurm has taken from the job
        if [ "${state#down}" != "$state" ] || { [ -n "$nodes" ] &&
                ! scontrol show hostnames "$nodes" | grep -qxF "$tangram_first"; }; then
            [ ! -s "$tangram_folder/lost.component" ] ||
                scontrol update jobid="$(cat "$tangram_folder/lost.component")" starttime=now+3minutes
            said="$(scontrol requeue "$slurm_job" 2>&1)" && exit "$status"
            [ "$said" = "${said#*pending execution}" ] || exit "$status"  # another worker was first, or a component waited
            echo "$said" >&2                            # as where requeueing is not allowed
            ! squeue -h -j "$slurm_job" -o %T | grep -qx RUNNING || scancel "$slurm_job"
            exit "$status"
        fi
        sleep 30
    done
    exit "$status"'
lend=(--job-name=workers --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none
      --task-epilog="$epilog")
