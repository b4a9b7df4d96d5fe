"""The name under which this process's user is accounted."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """Returns the login name of this process's user, or the user's number as text if the user has
    no name.

    The name is taken from LOGNAME, USER, LNAME or USERNAME, else from the password database. A
    container that runs under a foreign user id has none of these, and neither has a node whose
    directory service does not answer; Slurm prints such a user as a number too.
    """
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError up to Python 3.12, OSError from 3.13 on
        return str(os.getuid())
