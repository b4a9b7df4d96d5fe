"""What may be wrong with an image: it can never be used, or it cannot be had now.

Both are one line that begins with `image:` and names the image or the entry, and the remedy.
"""

from __future__ import annotations

import errno

from ..errors import DISK_FULL, InvalidInput, TangramError

_NOT_NOW = DISK_FULL | {errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS,
                        errno.ESTALE, errno.EACCES, errno.EFBIG,
                        errno.EAGAIN,  # no process can be started
                        # of a network file system whose server is away or has shut this node out
                        errno.ESHUTDOWN, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN,
                        errno.EHOSTUNREACH, errno.EREMOTEIO, errno.ENOLCK}
MAKE_ROOM = ("make room in the store of images (`image_store`, or the worker's scratch folder) and "
             "in the job's folder")


class ImageRefused(InvalidInput):
    """Raised when an image can never be used as it is: it does not exist, breaks a rule, is too
    large, or is not what its digest says. Another attempt is of no use.
    """


class ImageUnavailable(TangramError):
    """Raised when an image cannot be had now: its registry does not answer, or a disk is full. A
    later attempt may help.
    """


class RegistryUnavailable(ImageUnavailable):
    """Raised when a registry does not serve an image now. Layers that are ready stay in the store,
    and the next attempt goes on with them.
    """


def of_os_error(what: str, error: OSError) -> TangramError:
    """Returns the error to raise for a failed system call; `what` names the entry or the file."""
    remedy = f"; {MAKE_ROOM}" if error.errno in DISK_FULL else ""
    text = f"image: {what}: {error.strerror or error}{remedy}"
    return ImageUnavailable(text) if error.errno in _NOT_NOW else ImageRefused(text)
