export TANGRAM_HOME="${TANGRAM_HOME:-$HOME/.tangram}"   # on a file system that all nodes share
[[ $TANGRAM_HOME != "~/"* ]] || TANGRAM_HOME="$HOME${TANGRAM_HOME:1}"  # a ~ in quotes
[[ $TANGRAM_HOME = /* ]] || TANGRAM_HOME="$PWD/$TANGRAM_HOME"  # Slurm runs no task epilog by a relative path
export TANGRAM_JOB="$SLURM_JOB_ID"
export TANGRAM_END_MARGIN_S=<WARN>                      # seconds before the end at which nodes stop lending
# the folder that this job's broker makes; with the cluster's name, as clusters repeat job numbers
folder="$TANGRAM_HOME/jobs/$TANGRAM_JOB${SLURM_CLUSTER_NAME:+@$SLURM_CLUSTER_NAME}"
access="$folder/access.json"
step="$folder/trainer.step"                             # the number of the trainers' step
lost="$folder/lost.component"                           # of a het job: the component that this script holds back
trainer=$(cat <<'END_OF_TRAINER'
<TRAINER>
END_OF_TRAINER
)
