"""The directories of a sandbox that are empty before each action without a session."""

from __future__ import annotations

import os

from . import scratch

_SHM = "/dev/shm"


class Unemptied(Exception):
    """Raised when the directories cannot be emptied: the sandbox must not be used again. The
    text is one line that says why.
    """


class FreshFolders:
    """The directories in which an action can leave files.

    Args:
        home: the session's directory, in which commands begin.
        tmp: the directory for temporary files.
        shared_memory: whether /dev/shm is the sandbox's own, and not the node's.
        keep: names in the directories that are mount points and stay.
        once: whether they lie in a writable image: a layer cannot be emptied beneath its overlay.

    Attributes:
        paths: the directories, `home` first.
    """

    def __init__(self, home: str, tmp: str, shared_memory: bool, keep: frozenset[str], once: bool
                 ) -> None:
        self.paths = [home, tmp, *([_SHM] if shared_memory else [])]
        self._keep, self._once = keep, once

    @property
    def never_empty(self) -> bool:
        """Whether something is always in them, or they cannot be emptied."""
        return self._once or bool(self._keep)

    def are_empty(self) -> bool:
        """Makes `home` the directory of this process again, and returns whether nothing was left,
        so that the next action may come.
        """
        try:
            os.chdir(self.paths[0])
            return not self._once and not any(
                os.path.islink(path) or set(os.listdir(path)) - self._keep for path in self.paths)
        except OSError:
            return False

    def empty(self) -> None:
        """Removes all that is in them.

        Raises:
            Unemptied: something cannot be removed, or they lie in a writable image.
        """
        if self._once:
            raise Unemptied("an image's root is used once")
        home, tmp, *shared = self.paths
        try:
            scratch.empty(home, tmp, keep=self._keep)
            for path in shared:
                if os.listdir(path):
                    scratch.empty(path)
                    os.chmod(path, 0o1777)
            os.chdir(home)
        except OSError as error:
            raise Unemptied(
                f"the sandbox's directory cannot be emptied ({error.strerror})") from None
