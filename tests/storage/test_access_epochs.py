"""The access file of a superseded broker leads nobody to it, and does not hide its successor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tangram_hpc.app.access_dial import AccessFileDialer
from tangram_hpc.errors import AccessError, BrokerUnreachable
from tangram_hpc.storage.access import (
    FORMAT,
    Access,
    mark_ended,
    read_access,
    renew_access,
    write_access,
)
from tangram_hpc.storage.folder_lock import FileLock, FolderLock

ACCESS = Access("j", ("unix:/nowhere",), b"k" * 32, "/store", "host", 7, 5.0)


def taken(folder: Path) -> FolderLock:
    lock = FileLock(folder)
    lock.release()
    return FolderLock(folder, lock)


def test_a_file_names_its_broker_until_another_one_takes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    first = replace(ACCESS, epoch=taken(tmp_path).epoch)
    write_access(path, first)
    assert read_access(path) == first
    second = replace(ACCESS, pid=8, epoch=taken(tmp_path).epoch)
    found = read_access(path)  # the second broker does not serve yet
    assert not found.addresses and not found.key and found.back_within_s >= 30
    assert (found.job, found.store, found.pid) == ("j", "/store", 7)
    with pytest.raises(BrokerUnreachable, match="superseded"):
        AccessFileDialer(path).dial()
    with pytest.raises(BrokerUnreachable, match="superseded"):
        AccessFileDialer(path, "unix:/mine").dial()
    write_access(path, second)
    assert read_access(path) == second


def test_what_a_superseded_broker_writes_late_hides_nobody(tmp_path: Path) -> None:
    """Stopped between its check and its write: at its start, and at its end."""
    path = tmp_path / "access.json"
    first = replace(ACCESS, epoch=taken(tmp_path).epoch)
    second = replace(ACCESS, pid=8, epoch=taken(tmp_path).epoch)
    for late in (lambda: write_access(path, first),
                 lambda: mark_ended(path, "j", "now", first.epoch)):
        write_access(path, second)
        renew_access(path, second)
        late()
        assert not read_access(path).addresses
        renew_access(path, second)  # as with each heartbeat
        assert read_access(path) == second
    mark_ended(path, "j", "now", second.epoch)
    renew_access(path, second)
    with pytest.raises(AccessError, match="has ended at now; start a new one, or wait"):
        read_access(path)


def test_who_has_read_a_higher_epoch_refuses_a_lower_one(tmp_path: Path) -> None:
    """Also where the epochs' files cannot be seen, as with a copy of the file."""
    path = tmp_path / "access.json"
    dialer = AccessFileDialer(path)
    write_access(path, replace(ACCESS, epoch=2))
    assert dialer.read().addresses
    write_access(path, replace(ACCESS, epoch=1))
    assert not dialer.read().addresses and AccessFileDialer(path).read().addresses


def test_a_file_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    taken(tmp_path)
    fields = {"job": "j", "addresses": ["unix:/nowhere"], "key": "00", "store": "/store",
              "host": "host", "pid": 7, "format": FORMAT, "ended": ""}
    path.write_text(json.dumps(fields))
    path.chmod(0o600)
    assert read_access(path) == Access("j", ("unix:/nowhere",), b"\0", "/store", "host", 7)
    path.write_text(json.dumps({"format": FORMAT, "job": "j", "ended": "now"}))
    with pytest.raises(AccessError, match="has ended"):
        read_access(path)
