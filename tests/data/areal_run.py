"""Trajectories of AReaL's own workflow with the agent of `tangram_hpc.hooks.areal`, for a test.

    python -m areal_run FOLDER

It starts AReaL's proxy as a process with an engine whose answers are a script, plays a trajectory
in each mode and one whose sandbox is lost, and prints what AReaL recorded as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from areal.experimental.openai.proxy.workflow import OpenAIProxyWorkflow
from areal_engine import write_tokenizer

from tangram_hpc.hooks.areal.sandbox_agent import EpisodeAgent
from tangram_hpc.hooks.process_client import use_client
from tangram_hpc.hooks.text_episodes import SandboxEpisode

KEY = "for-the-test"
SCRIPT = ["<bash>echo 42 > answer</bash>", "<bash>cat answer</bash>", "It is done."]
DATA = {"messages": [{"role": "user", "content": "Write 42."}], "answer": "grep -qx 42 answer"}


class LosingAgent(EpisodeAgent):
    """An agent whose sandbox is closed behind its back before the first command."""

    def _episode(self, data: Any) -> SandboxEpisode:
        episode = super()._episode(data)
        opens = episode.open_async

        async def open_and_lose() -> None:
            await opens()
            episode._slot.session.close()  # type: ignore[union-attr]

        episode.open_async = open_and_lose  # type: ignore[method-assign]
        return episode


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120):
        pass


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def wait_for(url: str, proxy: subprocess.Popen[bytes]) -> None:
    while proxy.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("AReaL's proxy ended before it answered")


async def play(url: str, mode: str, agent: EpisodeAgent) -> Any:
    """Plays one trajectory; returns the reward of each answer that AReaL recorded, or why it
    rejected the trajectory."""
    workflow = OpenAIProxyWorkflow(mode, agent, url, KEY, export_style="individual")
    try:
        recorded = await workflow.arun_episode(None, dict(DATA))
    except Exception as error:  # noqa: BLE001 - AReaL's executor catches all and rejects
        return f"{type(error).__name__}: {error}"
    return [each.reward for each in recorded.values()]


def main() -> None:
    folder = Path(sys.argv[1])
    write_tokenizer(folder / "tokenizer")
    port = free_port()
    proxy = subprocess.Popen(
        [sys.executable, "-m", "areal.experimental.openai.proxy.proxy_rollout_server", "--host",
         "127.0.0.1", "--port", str(port), "--experiment-name", "e", "--trial-name", "t", "--role",
         "r", "--worker-index", "0", "--nfs-record-root", str(folder / "names")],
        env={**os.environ, "AREAL_SCRIPT": json.dumps(SCRIPT), "AREAL_KEY": KEY,
             "AREAL_TOKENIZER": str(folder / "tokenizer")})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, proxy)
        post(url + "/create_engine", {"engine": "areal_engine.ScriptedEngine"})
        post(url + "/call", {"method": "initialize"})
        told = {"subproc": asyncio.run(play(url, "subproc", EpisodeAgent())),
                "inline": asyncio.run(play(url, "inline", EpisodeAgent())),
                "lost": asyncio.run(play(url, "inline", LosingAgent()))}
    finally:
        proxy.terminate()
        proxy.wait(30)
    use_client(None)
    print("recorded " + json.dumps(told))


if __name__ == "__main__":
    main()
