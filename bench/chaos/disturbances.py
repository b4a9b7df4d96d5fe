"""What `bench_restarts.py` does to the processes of its job, and when.

The disturbances come from a deck of cards that is shuffled by a seed, so that each kind comes as
often as it is wanted, at any moment: the broker is killed (now and then again while it is being
started) or stopped; a worker is killed, which is the loss of a node, or stopped for less than the
silence that makes it lost; the gateway is stopped, shortly or for so long that its ranks go on over
the socket. Gateways are not killed, because `mpiexec` ends the whole world with one of its ranks.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from .disturbed_job import DisturbedJob

DECK = {"kill the broker": 10, "stop the broker": 5, "kill a worker": 2, "stop a worker": 1,
        "stop the gateway": 1, "begin another world": 1}
DOUBLE = 0.2  # how many kills of the broker are followed by one while it is being started
WORKER_S, GATEWAY_S = 15.0, 9.0  # longest stops; both may be cut by `pause_s`
NODE_S = 10.0  # the death of a worker may be felt for the broker's grace, and for so much more
LATE_S = 1.2  # a killed worker is replaced after so many seconds at the latest


@dataclass
class Disturber:
    """Draws the cards, and counts.

    Args:
        job: the job.
        gap_s: mean seconds between two disturbances.
        pause_s: shortest and longest stop of the broker, in seconds.
        rng: decides everything.
        grace_s: the job's setting.

    Attributes:
        kills: when the broker was killed, epoch seconds.
        stops: for how many seconds the broker was stopped, each time.
        others: from when until when other disturbances may be felt, epoch seconds.
        done: how often each card came.
    """

    job: DisturbedJob
    gap_s: float
    pause_s: tuple[float, float]
    rng: random.Random
    grace_s: float
    kills: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    others: list[tuple[float, float]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def disturb(self, seconds: float) -> None:
        """Disturbs the job until the time is over."""
        until = time.time() + seconds
        deck: list[str] = []
        while True:
            if not deck:
                deck = [card for card, count in DECK.items() for _ in range(count)]
                self.rng.shuffle(deck)
            wait = self.rng.uniform(0.3, 1.7) * self.gap_s
            if time.time() + wait > until:
                time.sleep(max(0.0, until - time.time()))
                return
            time.sleep(wait)
            self.play(deck.pop())

    def play(self, card: str) -> None:
        """Carries out one entry of DECK."""
        if card == "kill the broker":
            self._kill_broker()
            if self.rng.random() < DOUBLE:
                time.sleep(self.rng.uniform(0.0, 1.5))
                self._kill_broker()
        elif card == "stop the broker":
            least, most = self.pause_s
            seconds = least + (most - least) * self.rng.random() ** 3  # a few are long
            self._stop(self.job.broker(), seconds, self.stops)
        elif card == "kill a worker":
            number = self.rng.randrange(len(self.job.workers))
            self.job.workers[number].kill()
            self.others.append((time.time(), time.time() + self.grace_s + NODE_S))
            time.sleep(self.rng.uniform(0.0, LATE_S))
            self.job.replace_worker(number)
        elif card == "stop a worker":
            worker = self.rng.choice(self.job.workers)
            self._stop(worker.pid, self.rng.uniform(0.2, min(WORKER_S, self.pause_s[1])))
        elif self.job.world is None:
            return
        elif card == "stop the gateway":
            self._stop(self.job.gateway(), self.rng.uniform(0.2, min(GATEWAY_S, self.pause_s[1])))
        else:
            self.job.end_world()
            self.job.begin_world()
        self.done[card] += 1

    def _kill_broker(self) -> None:
        broker = self.job.broker()
        if broker:
            at = time.time()
            os.kill(broker, signal.SIGKILL)
            self.kills.append(at)

    def _stop(self, pid: int, seconds: float, stops: list[float] | None = None) -> None:
        if not pid:
            return
        since = time.time()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        self.others.append((since, time.time() + 1.0))
        if stops is not None:
            stops.append(seconds)
