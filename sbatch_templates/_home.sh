export TANGRAM_HOME="${TANGRAM_HOME:-$HOME/.tangram}"   # on a file system that all nodes share
export TANGRAM_JOB="$SLURM_JOB_ID"
export TANGRAM_END_MARGIN_S=<WARN>                      # nodes lend no more when the end is so near
# of this job's broker, made by it; clusters that share a home number their jobs alike
folder="$TANGRAM_HOME/jobs/$TANGRAM_JOB${SLURM_CLUSTER_NAME:+@$SLURM_CLUSTER_NAME}"
access="$folder/access.json"
step="$folder/trainer.step"                             # the number of the trainers' step
trainer=$(cat <<'END_OF_TRAINER'
<TRAINER>
END_OF_TRAINER
)
