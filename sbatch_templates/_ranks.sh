# ---- trainers: one step; `tangram rank` makes the last rank of an MPI world the gateway --------------
# --kill-on-bad-exit=0: ranks outlive a gateway that dies, and go on over the broker's socket.
# --distribution=plane: the same number of ranks on each node, in order, and then the gateway.
TANGRAM_WORLD_SIZE=<TASKS_TRAINER> \
srun ${trainer_step[@]+"${trainer_step[@]}"} --job-name=ranks --ntasks=<TASKS_TRAINER> --cpus-per-task=<CPUS_PER_RANK> \
    --distribution=plane=<RANKS_NODE> --mpi=<MPI> --kill-on-bad-exit=0 \
    tangram rank --gateway=<GATEWAY> --step-file="$step" -- bash -c "$trainer" &
ranks=$!
wait "$ranks"                                            # the job ends with this exit status
