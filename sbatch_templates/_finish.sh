# ---- the end of the job, for any reason: leaves nothing on any node ---------------------------------
broker="" workers=() watcher="" ranks="" evicted="" told_to_end=""
asked=""                                                 # what Slurm says of the job when its trainers have ended
preempted() {           # whether Slurm has told the steps, and not this script, that it preempts the job
    asked=$(SLURM_TIME_FORMAT=standard timeout 5 scontrol -o show job "$slurm_job" 2>/dev/null)
    local told="${asked%%$'\n'*}"                        # of a het job: its first component
    [[ $told =~ " StartTime="([0-9T:-]+) ]] || return 1  # without 1, a trap returns what was before it
    local began="${BASH_REMATCH[1]}"                     # an earlier start may have been preempted too
    [[ $told =~ " PreemptTime="([0-9T:-]+) ]] && [[ ! ${BASH_REMATCH[1]} < $began ]]
}
lost_nodes() {          # prints the nodes of the trainers' step that Slurm has taken from the job
    local told=$'\n'"$asked" here=none had
    [ -s "$step.nodes" ] && had=$(scontrol show hostnames "$(cat "$step.nodes")" 2>/dev/null) || return 0
    [[ $told =~ $'\n'"JobId=${SLURM_JOB_ID_HET_GROUP_2:-$SLURM_JOB_ID} "[^$'\n']* ]] || return 0
    told="${BASH_REMATCH[0]}"
    # a component that has lost all its nodes does not run any more, but is put back into the queue
    if [[ $told =~ " JobState=RUNNING " && $told =~ " NodeList="([^\ ]+) ]]; then
        here=$(scontrol show hostnames "${BASH_REMATCH[1]}" 2>/dev/null) || return 0
    fi
    grep -vxF "$here" <<< "$had" | paste -sd ,
}
let_start() {           # of a het job: the component that was held back may start when the whole job can have ended, and starts again
    [ ! -s "$lost" ] || timeout 5 scontrol update jobid="$(cat "$lost")" starttime="now+$((180 + <WARN>))seconds"
}
drop_leftovers() {      # of a het job: components that lost all their nodes and wait in the queue alone
    local n left=afterok told component own="(^|"$'\n'")$SLURM_JOB_ID +$start "
    [ "$1" -ne 0 ] || left=afternotok                    # a dependency that this job cannot fulfil
    for ((n = 0; n < 10; n++)); do
        told=$(timeout 5 squeue -h -t all -j "$SLURM_JOB_ID" -O JobID:20,RestartCnt:20,State:20 2>/dev/null)
        # a component that lost its nodes waits in the queue only when its last processes there have ended
        [[ $told =~ $own\ *RUNNING && $told =~ COMPLETING ]] || break
        sleep 1
    done
    if [[ ! $told =~ $own ]]; then                       # a higher restart count: Slurm has put this component back
        let_start
        # Slurm 22.05 puts it back alone when it has one node, and that node or one of another component is set
        # down or lost. It could never start without the others; where the whole job was put back, none runs.
        if [[ $told =~ RUNNING ]]; then
            echo "tangram: Slurm has put the first component of job $SLURM_JOB_ID back into the queue: the others follow"
            scontrol requeue "$SLURM_JOB_ID" 2>/dev/null # it says that the first one waits already
        fi
        return 0
    fi
    for component in $(sed -n 's/ .* PENDING *$//p' <<< "$told"); do
        # scancel refuses one component, but Slurm ends it when this job is over: --kill-on-invalid-dep
        timeout 5 scontrol update jobid="$component" dependency="$left:$SLURM_JOB_ID" || echo "tangram: a component of job" \
            "$SLURM_JOB_ID lost its nodes and waits in the queue alone; \`scancel $SLURM_JOB_ID\` removes it" >&2
    done
}
finish() {
    status=$?
    trap '' TERM INT HUP USR1
    set +e
    [ -z "$watcher" ] || kill -TERM "$watcher" 2>/dev/null
    let_start
    if [ -n "$again" ] && [ -n "$broker" ] && [ -n "$ranks" ]; then
        kill -USR1 "$broker" 2>/dev/null                 # drains: nothing new starts, running actions may end
    fi
    if [ -n "$ranks" ] && kill -0 "$ranks" 2>/dev/null; then
        number=$(cat "$step" 2>/dev/null)
        if [ -n "$number${every_step:-}" ]; then         # SIGTERM to the ranks, and time to end; srun would kill them at once
            # While a later job waits in the queue, scancel (seen: 22.05, 24.11) signals a step twice, and so would end a trainer that
            # is saving. It asks before each signal: yes, then no. Without --ctld it also fails for nodes without this step.
            { echo y; yes n; } 2>/dev/null |
                scancel --quiet --ctld --interactive --signal=TERM "$trainer_job${number:+.$number}" > /dev/null
            for ((n = 0; n < <WARN>; n++)); do
                kill -0 "$ranks" 2>/dev/null || break
                sleep 0.5
            done
        fi
        kill -TERM "$ranks" 2>/dev/null
        wait "$ranks"
        status=$?
    elif [ -n "$ranks" ] && [ -z "$told_to_end" ] && preempted; then # Slurm had told the trainers to end
        again="" evicted=yes
    elif [ -n "$ranks" ] || [ -z "$again" ]; then        # else the warning came before the trainers started
        again=""                                         # the trainers had ended by themselves: no further start
        lost_there=""
        if [ "$status" -eq 0 ] && [ -n "$asked" ]; then  # srun may say so of a step that lost a node (seen: 22.05)
            lost_there=$(lost_nodes)
        fi
        if [ -n "$lost_there" ]; then
            echo "tangram: error: Slurm took $lost_there from job $slurm_job while the trainer ran there: the trainer has not" \
                "ended by itself, so the job's status is 1" >&2
            status=1
        elif [ "$status" -eq 0 ] && [ -n "$broker" ]; then  # the work is complete: the kept results can go
            tangram shutdown > /dev/null 2>&1
        fi
    fi
    if [ -n "$broker" ]; then
        kill -TERM "$broker" 2>/dev/null                 # the broker ends in order, and its workers with it
        wait "$broker" ${workers[@]+"${workers[@]}"}   # empty: unbound before bash 4.4
    fi
    if [ -n "$again" ] && [ "$start" -lt <REQUEUES> ]; then
        echo "tangram: the time limit is near: start $((start + 1)) of <REQUEUES> follows"
        requeue && exit "$status"
    elif [ -n "$again" ]; then
        echo "tangram: the time limit is near (warn=<WARN> s): the job ends, as requeues=<REQUEUES> allows no further start"
    elif [ -n "$evicted" ]; then
        echo "tangram: Slurm preempts this job, and its trainer has ended: the job waits for its next start"
        requeue && exit "$status"                        # fails if requeueing is not allowed: the job is over
    fi
    if [ "${SLURM_HET_SIZE:-0}" -gt 1 ]; then
        drop_leftovers "$status"
    fi
    exit "$status"
}
trap finish EXIT
trap 'again=yes; exit 143' USR1                          # the time limit is near
trap 'told_to_end=yes; exit 143' TERM
trap 'told_to_end=yes; exit 130' INT
trap 'told_to_end=yes; exit 129' HUP
if [ -n "$again" ]; then                                 # the warning has come already
    exit 143
fi
