"""Hooks and servers ask to keep as much output as their callers expect; where the site's bound is
lower they keep what it allows. A command that asks for more than the bound is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from helpers.e2b_player import Player
from helpers.http_serving import Serving

from tangram_hpc import ActionState, LocalCluster
from tangram_hpc.hooks.code_rewards import code_score
from tangram_hpc.hooks.harness.harness_session import most_output
from tangram_hpc.hooks.process_client import use_client

BOUND = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("home")
    with LocalCluster(cpus=2, warm=1, home=home, output_bound=BOUND) as cluster:
        yield cluster


def test_a_client_knows_the_bound(cluster: LocalCluster) -> None:
    with cluster.session() as session:
        assert cluster.client.output_bound == session.output_bound == BOUND
        ends = [session.exec("echo here", output_max=most).result().state
                for most in (BOUND, BOUND + 1)]
        assert ends == [ActionState.COMPLETED, ActionState.FAILED]
        assert most_output(session) == BOUND
    with LocalCluster(cpus=1, warm=0, output_max=4 << 20, output_bound=1 << 20) as other:
        assert other.client.output_bound == 4 << 20


def test_a_right_answer_is_right_where_little_output_is_kept(cluster: LocalCluster) -> None:
    use_client(cluster.client)
    try:
        assert asyncio.run(code_score("```python\nprint(int(input()) + 1)\n```",
                                      {"inputs": ["1\n"], "outputs": ["2\n"]})) == 1.0
    finally:
        use_client(None)


def test_commands_of_e2b_run_where_little_output_is_kept(cluster: LocalCluster) -> None:
    with Serving(cluster) as server:
        player = Player(server.url, server.key)
        player.create()
        assert player.run("echo alive").output() == b"alive\n"
