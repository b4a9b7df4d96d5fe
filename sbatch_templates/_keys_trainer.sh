#: ranks=2                   trainer ranks; the gateway is one rank more
#: gateway=on                off: no gateway, all ranks are trainers and use the broker's socket
#: cpus_per_rank=1           CPUs of each rank
#: mpi=pmi2                  how srun starts MPI: pmi2 for MPICH (`srun --mpi=list` names the others); none
#:                           for trainers without MPI, together with gateway=off
#: launcher=none             torchrun or ray: one task a trainer node, by which torchrun starts a rank for
#:                           each GPU, or Ray a cluster on which the first node runs the trainer; `ranks` is
#:                           then the number of trainer nodes, and there is no gateway and no MPI
#: container_image=          (optional) image in which the trainer and its launcher run
#: container=apptainer       apptainer, or pyxis for the site's plugin of this name; without an image, none
#: placer=elastic            elastic, paper, first-fit, fcfs:K or static:K
#: broker_options=           (optional) further words of `tangram broker`, such as "--idle-release 300"
#: trainer                   the trainer's command line, such as "python train.py"
