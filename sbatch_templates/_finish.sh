# ---- the end of the job, for any reason: leaves nothing on any node ---------------------------------
broker="" workers=() ranks="" again=""
finish() {
    status=$?
    trap '' TERM INT HUP USR1
    set +e
    if [ -n "$again" ] && [ -n "$broker" ]; then
        kill -USR1 "$broker" 2>/dev/null                 # drains: nothing new starts, running actions may end
    fi
    if [ -n "$ranks" ] && kill -0 "$ranks" 2>/dev/null; then
        if [ -s "$step" ]; then          # SIGTERM to the ranks, and time to end; srun would kill them at once
            scancel --quiet --signal=TERM "$trainer_job.$(cat "$step")"
            for ((n = 0; n < <WARN>; n++)); do
                kill -0 "$ranks" 2>/dev/null || break
                sleep 0.5
            done
        fi
        kill -TERM "$ranks" 2>/dev/null
        wait "$ranks"
        status=$?
    else
        again=""                                         # the trainers had ended by themselves: no further start
        if [ "$status" -eq 0 ] && [ -n "$broker" ]; then # the work is complete: the kept results can go
            tangram shutdown > /dev/null 2>&1
        fi
    fi
    if [ -n "$broker" ]; then
        kill -TERM "$broker" 2>/dev/null                 # the broker ends in order, and its workers with it
        wait "$broker" ${workers[@]+"${workers[@]}"}   # empty: unbound before bash 4.4
    fi
    if [ -n "$again" ] && [ "$start" -lt <REQUEUES> ]; then
        echo "tangram: the time limit is near: start $((start + 1)) of <REQUEUES> follows"
        scontrol requeue "$SLURM_JOB_ID"                 # ends this script
    fi
    exit "$status"
}
trap finish EXIT
trap 'again=yes; exit 143' USR1                          # the time limit is near
trap 'exit 143' TERM
trap 'exit 130' INT
trap 'exit 129' HUP
