"""The version of this package; nothing else."""

VERSION = "0.1.0"
