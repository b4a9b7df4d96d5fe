"""An environment of verifiers: the policy writes a file with a shell command, in a sandbox.

The harness is a program of its own in the sandbox. It asks the policy by the endpoint that
verifiers gives it, runs what the policy has answered, and the reward reads what the command left.
"""

from __future__ import annotations

import verifiers.v1 as vf

PROGRAM = """
import json, subprocess, sys, urllib.request
endpoint, secret, model, prompt = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
request = urllib.request.Request(
    endpoint + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + secret})
answer = json.load(urllib.request.urlopen(request))
subprocess.run(answer["choices"][0]["message"]["content"], shell=True, check=True)
"""


class WordsData(vf.TaskData):
    """One task.

    Attributes:
        word: what the file must hold.
    """

    word: str


class WordsTask(vf.Task[WordsData]):
    """The file `given` is there before, and `made` must be there afterwards."""

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Writes the file that the policy's command reads."""
        await runtime.write("given", self.data.word.encode())

    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """The part of the checks that hold: of the content, and of bytes that are not UTF-8."""
        read = (await runtime.read("made")).decode()
        shown = await runtime.run(["sh", "-c", "cat made; echo $WORD; exit 3"], {"WORD": "env"})
        right = [read == self.data.word * 2, shown.stdout == f"{read}env\n", shown.exit_code == 3]
        await runtime.write("bytes", bytes(range(256)))
        right.append(await runtime.read("bytes") == bytes(range(256)))
        return sum(right) / len(right)


class WordsTaskset(vf.Taskset[WordsTask, vf.TasksetConfig]):
    """Three tasks."""

    def load(self) -> list[WordsTask]:
        """Returns the tasks."""
        return [WordsTask(WordsData(prompt=f"Write the content of the file {name!r} twice.",
                                    word=name), self.config.task)
                for name in ("one", "two", "ä")]


class WordsHarness(vf.Harness[vf.HarnessConfig]):
    """Runs `PROGRAM` in the sandbox."""

    async def launch(self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime,
                     endpoint: str, secret: str, mcp_urls: dict[str, str],
                     data: vf.TaskData) -> vf.ProgramResult:
        """Asks the policy once and does what it says."""
        await runtime.write("program.py", PROGRAM.encode())
        return await runtime.run_program(
            ["python3", "program.py", endpoint, secret, ctx.model, str(data.prompt)], {})


__all__ = ["WordsHarness", "WordsTaskset"]
