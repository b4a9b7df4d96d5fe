# ---- workers: one long step a component; actions never become steps ---------------------------------
# On scancel srun kills its tasks at once, so that a worker may not come to clean up after itself:
# Slurm's task epilog does it, whatever ended the worker.
epilog="$folder/epilog.$SLURM_JOB_ID"
cat > "$epilog" <<'END_OF_EPILOG'
#!/bin/bash
rm -rf "<SCRATCH>/tangram-$SLURM_JOB_ID-$SLURMD_NODENAME"
END_OF_EPILOG
chmod 700 "$epilog"
worker='export TANGRAM_SCRATCH="<SCRATCH>/tangram-$SLURM_JOB_ID-$SLURMD_NODENAME"
    rm -rf "$TANGRAM_SCRATCH" && mkdir "$TANGRAM_SCRATCH" && exec tangram worker --component "$1"'
lend=(--ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --mpi=none --task-epilog="$epilog")
