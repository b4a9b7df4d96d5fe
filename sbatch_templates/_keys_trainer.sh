#: ranks=2                   trainer ranks; the gateway is one rank more
#: gateway=on                off: no gateway, all ranks are trainers and use the broker's socket
#: cpus_per_rank=1           CPUs of each rank
#: mpi=pmi2                  how srun starts MPI: pmi2 for MPICH (`srun --mpi=list` names the others); none
#:                           for trainers without MPI, together with gateway=off
#: placer=elastic            elastic, paper, first-fit, fcfs:K or static:K
#: broker_options=           (optional) further words of `tangram broker`, such as "--idle-release 300"
#: trainer                   the trainer's command line, such as "python train.py"
