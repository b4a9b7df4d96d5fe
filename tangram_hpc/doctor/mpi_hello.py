"""One rank of the doctor's hello: it meets the others, and rank 0 prints one JSON line.

The rank is a program of its own, whose only use of MPI is one allgather. It ends by itself even if
the others hang. With the argument `library` it prints which MPI library mpi4py uses and does not
start MPI.
"""

from __future__ import annotations

import json
import signal
import sys
import time

from ..transport.mpi.mpi_shm import forget_names

_ALONE_S = 40  # MPI_Init waits for ever for a rank that never comes


def main(arguments: list[str]) -> int:
    """Runs the program; returns the exit status."""
    signal.alarm(_ALONE_S)  # SIGALRM's default action ends this process, inside MPI as well
    began = time.monotonic()
    import mpi4py

    if arguments == ["library"]:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].strip("\0")
    library = " ".join(library.replace("Version:", "").split())
    if arguments == ["library"]:
        print(json.dumps({"library": library}))
        return 0
    world = MPI.COMM_WORLD
    hosts = world.allgather(MPI.Get_processor_name())
    forget_names()  # a rank that is killed from now on leaves no file
    if world.rank == 0:
        print(json.dumps({"size": world.size, "hosts": len(set(hosts)), "library": library,
                          "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
                          "seconds": round(time.monotonic() - began, 3)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
