"""Many clients of `/run_code` at once: answers per second at capacity, at 80 % and at 200 % of it.

Capacity is what clients reach that each send the next request as soon as they are answered. Then
requests arrive at fixed shares of it, each on a connection of its own as verl sends them. At 80 %
none may be late or wrong; at 200 % the excess is answered with 504 before its client gives up. As
verl does, a client tries 504 again, twice at most, and then the call has failed.

    python bench/bench_run_code.py --callers 512 --seconds 600 --limit 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import common

from tangram_hpc import LocalCluster

SLACK_S = 10.0  # what a client waits beyond the two time limits of its request
PAUSES_S = (1.0, 2.0)  # of a client before it tries again after 504


@dataclass
class Answers:
    """What came back.

    Attributes:
        right_s: the seconds of each right answer; waiting after 504 is included.
        wrong: answers that were neither right nor 504.
        refused: answers 504.
        failed: calls whose last try was answered with 504.
        late: tries that were not answered before their client gave up.
        slowest_504_s: the longest time to an answer 504.
        at_once, most_at_once: calls that are not over, and the most there were at one time.
    """

    right_s: list[float] = field(default_factory=list)
    wrong: int = 0
    refused: int = 0
    failed: int = 0
    late: int = 0
    slowest_504_s: float = 0.0
    at_once: int = 0
    most_at_once: int = 0

    def figures(self, seconds: float) -> dict[str, Any]:
        """The counts, the rate and the percentiles."""
        return {"right": len(self.right_s), "wrong": self.wrong, "status_504": self.refused,
                "slowest_504_s": round(self.slowest_504_s, 2), "failed": self.failed,
                "late": self.late, "most_at_once": self.most_at_once,
                "per_s": round(len(self.right_s) / seconds, 1),
                **(common.percentiles(self.right_s) if self.right_s else {})}


class Caller:
    """Sends programs to one server. Each has another input, so a mixed-up answer is seen."""

    def __init__(self, url: str, key: str, limit_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._key, self._limit_s = key, limit_s
        self._sent = 0

    async def one(self, answers: Answers) -> None:
        """Sends one program until it is answered, and notes what came back."""
        self._sent += 1
        number, began = self._sent, time.perf_counter()
        answers.at_once += 1
        answers.most_at_once = max(answers.most_at_once, answers.at_once)
        try:
            for pause_s in (*PAUSES_S, None):
                if await self._try(number, began, answers):
                    break
                if pause_s is None:
                    answers.failed += 1
                else:
                    await asyncio.sleep(pause_s)
        finally:
            answers.at_once -= 1

    async def _try(self, number: int, began: float, answers: Answers) -> bool:
        """Sends a program once; returns whether the call is over."""
        body = json.dumps({"code": "print(int(input()) ** 2)", "language": "python",
                           "stdin": str(number), "compile_timeout": self._limit_s,
                           "run_timeout": self._limit_s}).encode()
        sent = time.perf_counter()
        try:
            status, answer = await asyncio.wait_for(self._post(body), 2 * self._limit_s + SLACK_S)
        except asyncio.TimeoutError:
            answers.late += 1
            return True
        now = time.perf_counter()
        if status == 504:
            answers.refused += 1
            answers.slowest_504_s = max(answers.slowest_504_s, now - sent)
            return False
        if status == 200 and json.loads(answer)["run_result"]["stdout"] == f"{number ** 2}\n":
            answers.right_s.append(now - began)
        else:
            answers.wrong += 1
        return True

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(f"POST /{self._key}/run_code HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                     "Content-Type: application/json\r\n"
                     f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head, _, answer = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), answer


async def closed(caller: Caller, callers: int, seconds: float) -> Answers:
    """So many callers, each of which sends its next program when it is answered."""
    answers, until = Answers(), time.perf_counter() + seconds

    async def go_on() -> None:
        while time.perf_counter() < until:
            await caller.one(answers)

    await asyncio.gather(*[go_on() for _ in range(callers)])
    return answers


async def at_rate(caller: Caller, rate: float, seconds: float) -> Answers:
    """Programs that arrive at a fixed rate, however many are unanswered."""
    answers, began, tasks = Answers(), time.perf_counter(), []
    for number in range(max(1, int(rate * seconds))):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        tasks.append(asyncio.ensure_future(caller.one(answers)))
    await asyncio.gather(*tasks)
    return answers


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", action="store_true", help="some seconds, for the tests")
    p.add_argument("--callers", type=int, default=64, help="callers who measure the capacity")
    p.add_argument("--seconds", type=float, default=60.0,
                   help="length of the parts at 80 %% and at 200 %%")
    p.add_argument("--capacity-seconds", type=float, default=0.0,
                   help="length of the part that measures the capacity; default: --seconds")
    p.add_argument("--limit", type=float, default=10.0,
                   help="time limit of a program and of its compilation, seconds; 504 comes 5 s "
                        "after both, so a smaller limit needs fewer callers to be seen")
    return p.parse_args()


def main() -> None:
    """Prints one line."""
    args = arguments()
    callers, seconds, limit_s = ((4, 1.0, 5.0) if args.tiny
                                 else (args.callers, args.seconds, args.limit))
    common.allow_open_files()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home, \
            LocalCluster(cpus=2, home=home, http=True) as cluster:
        assert cluster.http is not None
        caller = Caller(cluster.http.url, cluster.http.key, limit_s)
        first_s = args.capacity_seconds or seconds
        asyncio.run(closed(caller, 2, first_s / 4))  # the first sandboxes
        began = time.perf_counter()
        answers = asyncio.run(closed(caller, callers, first_s))
        took = time.perf_counter() - began
        figures["capacity"] = answers.figures(took)
        rate = len(answers.right_s) / took
        for share in (0.8, 2.0):
            began = time.perf_counter()
            answers = asyncio.run(at_rate(caller, share * rate, seconds))
            figures[f"at_{share:g}"] = answers.figures(time.perf_counter() - began)
    common.line("run_code", {"callers": callers, "seconds": seconds, "capacity_seconds": first_s,
                             "limit_s": limit_s}, figures)


if __name__ == "__main__":
    main()
