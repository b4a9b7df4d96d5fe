"""A Ray trainer for tests: an actor on each node uses the broker that the launcher's environment
names. It prints how many nodes Ray has and what the actions returned.
"""

import socket
import sys
import time

import ray

import tangram_hpc

NODES = int(sys.argv[1])


@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Rollouts:
    def total(self, first: int) -> tuple[str, int]:
        with tangram_hpc.connect(name=f"actor-{first}") as client:
            return socket.gethostname(), sum(client.map(pow, range(first, 20, NODES), [2] * 20))


deadline = time.monotonic() + 120
while True:  # a script that starts Ray by hand does not wait for it
    try:
        ray.init(address="auto", log_to_driver=False)
        break
    except ConnectionError:
        assert time.monotonic() < deadline, "Ray's head does not answer"
        time.sleep(1)
while len(ray.nodes()) < NODES:
    assert time.monotonic() < deadline, "not all nodes have joined"
    time.sleep(0.5)
actors = [Rollouts.remote() for _ in range(NODES)]
told = ray.get([actor.total.remote(n) for n, actor in enumerate(actors)], timeout=240)
print(f"ray nodes {len(ray.nodes())}, actors on {len({host for host, _ in told})}, "
      f"total {sum(part for _, part in told)}", flush=True)
