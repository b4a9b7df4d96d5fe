# ---- workers: one long step a component; actions never become steps ---------------------------------
# On scancel srun kills its tasks at once, so that a worker may not come to clean up after itself:
# Slurm's task epilog does it, whatever ended the worker. The folder's name is nobody's to guess:
# whoever made it first, where all may write, would keep the worker from starting.
export tangram_tag="job$SLURM_JOB_ID-$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')"
epilog="$folder/epilog.$SLURM_JOB_ID"
cat > "$epilog" <<'END_OF_EPILOG'
#!/bin/bash
rm -rf "<SCRATCH>/tangram-node-$tangram_tag-$SLURMD_NODENAME"
END_OF_EPILOG
chmod 700 "$epilog"
worker='export TANGRAM_SCRATCH="<SCRATCH>/tangram-node-$tangram_tag-$SLURMD_NODENAME"
    mkdir "$TANGRAM_SCRATCH" && exec tangram worker --component "$1" "${@:2}"'
lend=(--job-name=workers --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --mpi=none
      --task-epilog="$epilog")
