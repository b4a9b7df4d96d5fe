"""^C in a call of a client, at each place where it can come: the client goes on, as in a notebook.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.interrupted import places

from tangram_hpc import LocalCluster
from tangram_hpc.protocol.frame import Outbox, open_frame
from tangram_hpc.protocol.message import Input


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(cpus=2, home=tmp_path_factory.mktemp("home")) as c:
        yield c


def goes_on(cluster: LocalCluster, place: int) -> None:
    """Each action that is submitted now gets its own result."""
    futures = [cluster.submit(pow, n, 2) for n in range(4)]
    assert [future.result(20) for future in futures] == [0, 1, 4, 9], f"^C at place {place}"


def test_after_an_interrupted_put_each_message_has_its_own_payload() -> None:
    outbox = Outbox()
    for place in places(lambda: outbox.put(Input(1, 0, n=1), b"first")):
        outbox.put(Input(2, 0, n=1), b"second")
        parcels = open_frame(b"".join(outbox.take())[4:])
        told = [(message.id, bytes(payload)) for message, payload in parcels]  # type: ignore
        assert told in ([(2, b"second")], [(1, b"first"), (2, b"second")]), place


def test_after_an_interrupted_submission_each_action_has_its_own_result(cluster: LocalCluster
                                                                        ) -> None:
    for place in places(lambda: cluster.submit(pow, 10, 2)):
        goes_on(cluster, place)
