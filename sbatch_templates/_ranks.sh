# ---- trainers: one step; `tangram rank` makes the last rank of an MPI world the gateway --------------
# --kill-on-bad-exit=0: ranks outlive a gateway that dies, and go on over the broker's socket; --wait=0: also
# where the site's WaitTime would end a step some time after its first task.
# --distribution=plane: the same number of ranks on each node, in order, and then the gateway.
launcher=<LAUNCHER>
image="<CONTAINER_IMAGE>"                                # tangram must be installed in it
if [ -n "$image" ] && [ <CONTAINER> = pyxis ]; then
    trainer_step+=("--container-image=$image" "--container-mounts=$TANGRAM_HOME:$TANGRAM_HOME")
    image=""
fi
if [ "$launcher" = ray ]; then                           # Ray's files; on each node, and gone with the step
    TANGRAM_RAY_DIR="/tmp/ray-$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')"
    RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(od -An -N32 -tx8 /dev/urandom | tr -d ' \n')}"
    export TANGRAM_RAY_DIR RAY_AUTH_TOKEN RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"  # else anybody may use it
    ray_epilog="$folder/ray_epilog.$SLURM_JOB_ID"
    printf '#!/bin/bash\nrm -rf "$TANGRAM_RAY_DIR"\n' > "$ray_epilog"
    chmod 700 "$ray_epilog"
    trainer_step+=(--task-epilog="$ray_epilog")
fi
umask "$own_umask"                                       # this script writes no more files
TANGRAM_WORLD_SIZE=<TASKS_TRAINER> \
srun ${trainer_step[@]+"${trainer_step[@]}"} --job-name=ranks --ntasks=<TASKS_TRAINER> --cpus-per-task=<CPUS_PER_RANK> \
    --distribution=plane=<RANKS_NODE> --mpi=<MPI> --kill-on-bad-exit=0 --wait=0 \
    tangram rank --gateway=<GATEWAY> --step-file="$step" --launcher="$launcher" --apptainer="$image" \
    -- bash -c "$trainer" &
ranks=$!
wait "$ranks"                                            # the job ends with this exit status
