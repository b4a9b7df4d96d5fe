"""Puts a launcher and a container around a trainer's command on one node.

Some trainers want one process on each node, which starts the rest: torchrun starts a rank for each
GPU; Ray makes a cluster of all nodes, and the command runs on the first node. This module makes
command lines from an environment, and a folder for Ray. It starts nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import InvalidInput, WrongWorld

# Under a launcher these variables count nodes, and MASTER_PORT is the launcher's. They are removed
# from the trainer's environment: a rank that found them would take them for its own.
NODE_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE")
# The variable that names the folder for Ray's files. The script that sets it removes the folder.
RAY_FOLDER = "TANGRAM_RAY_DIR"


def check_launcher(launcher: str, gateway: str, environ: Mapping[str, str]) -> None:
    """Checks that a job step suits a launcher; all tasks of the job step come to the same result.

    Raises:
        InvalidInput: a gateway was asked for (`--gateway on`).
        WrongWorld: the job step has more than one task on a node.
    """
    if launcher == "none":
        return
    if gateway == "on":
        raise InvalidInput(f"--gateway on: --launcher {launcher} starts one task a node, and none "
                           "of them can be a gateway; use --gateway off")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # such as `1(x2),3`
    if any(part.partition("(")[0] not in ("", "1") for part in tasks.split(",")):
        raise WrongWorld(f"--launcher {launcher}: it wants one task a node, but the step has "
                         f"{tasks}; give srun --ntasks-per-node=1, or a template as many `ranks` "
                         "as trainer nodes")


def torchrun_words(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the command line by which torchrun runs a trainer's command on this node: once for
    each GPU, or once where there is none.

    Args:
        command: the trainer's command.
        environ: the environment of this task, with NODE_VARIABLES, which count nodes here.

    Raises:
        InvalidInput: one of NODE_VARIABLES is not set.
    """
    rank, nodes, host, port = (known("torchrun", environ, name) for name in
                               ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    # torchrun's own `auto` means each CPU where there is no GPU
    each = environ.get("TANGRAM_RANKS_PER_NODE") or (
        "gpu" if any(environ.get(name) for name in _GPUS) else "1")
    return ["torchrun", f"--nnodes={nodes}", f"--node-rank={rank}", f"--nproc-per-node={each}",
            f"--master-addr={host}", f"--master-port={port}", "--no-python", *command]


def known(launcher: str, environ: Mapping[str, str], name: str) -> str:
    """Returns a variable that a launcher needs.

    Raises:
        InvalidInput: it is not set.
    """
    value = environ.get(name, "")
    if not value:
        raise InvalidInput(f"--launcher {launcher}: {name} is not set; start it in a job step, as "
                           f"in `srun --ntasks-per-node=1 tangram rank --launcher {launcher} -- "
                           "...`")
    return value


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without NODE_VARIABLES."""
    return {k: v for k, v in environ.items() if k not in NODE_VARIABLES}


def contained(image: str, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the command line that runs a command in an apptainer image; without an image, the
    command itself.

    If CUDA_VISIBLE_DEVICES is set, NVIDIA GPUs are visible in the container (`--nv`). The folder
    TANGRAM_HOME, in which the broker's access file lies, is bound at the same path.

    Args:
        image: a `.sif` file, a folder or a URI of apptainer's; empty for none.
        command: the command.
        environ: the environment of the command.
    """
    if not image:
        return list(command)
    home = environ.get("TANGRAM_HOME") or f"{environ.get('HOME', '')}/.tangram"
    gpus = ["--nv"] if environ.get("CUDA_VISIBLE_DEVICES") else []
    return ["apptainer", "exec", *gpus, "--bind", home, image, *command]


def ray_folder(environ: Mapping[str, str]) -> Path:
    """Makes the folder for Ray's files on this node, and returns it.

    Raises:
        InvalidInput: it exists already, so it may be somebody else's, or it cannot be made.
    """
    folder = environ.get(RAY_FOLDER) or tempfile.mkdtemp(prefix="ray-")
    try:
        if environ.get(RAY_FOLDER):
            os.mkdir(folder, 0o700)
    except OSError as error:
        raise InvalidInput(f"{RAY_FOLDER}={folder}: {error.strerror}; name a folder that does not "
                           "exist, on a file system of the node") from None
    return Path(folder)
