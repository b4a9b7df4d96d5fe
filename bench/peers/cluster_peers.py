"""Peers that schedule tasks on clusters: Ray, Dask, Parsl and HyperQueue."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import work
from adapter import Peer, done
from pool_peers import NO_CORES
from work import Task

NO_SANDBOX = "it has no sandboxes"


class Ray(Peer):
    """`ray.init` on this machine without dashboard and logs. A remote function for each piece of
    work, and one `ray.get` for all; `max_retries` and everything else as shipped. Workers are
    prestarted by a first wave of tasks."""

    name = "Ray"
    packages = ("ray",)
    lacks = {"chunks": "batches are written by hand in the function",
             "sandboxed": "its sandboxes are experimental, and need gVisor"}

    def start(self) -> None:
        """Starts head and raylet."""
        import ray
        self.ray = ray
        ray.init(num_cpus=self.cores, include_dashboard=False, log_to_driver=False,
                 logging_level="ERROR", object_store_memory=200_000_000,
                 _temp_dir=str(self.folder))
        self.noop, self.true, self.hold = map(ray.remote, (work.noop, work.true, work.hold))

    def stop(self) -> None:
        """Ends all of it."""
        self.ray.shutdown()

    def functions(self, count: int) -> None:
        """One task each."""
        self.ray.get([self.noop.remote(i) for i in range(count)])

    def commands(self, count: int) -> None:
        """A task that runs the program."""
        self.ray.get([self.true.remote(i) for i in range(count)])

    def one(self) -> None:
        """One task."""
        self.ray.get(self.noop.remote(1))

    def sized(self, task: Task, ended: Callable[[Any], None]) -> None:
        """A task with `num_cpus`."""
        ref = self.hold.options(num_cpus=task.cores).remote(task.seconds)
        ref.future().add_done_callback(ended)

    def mixed(self, tasks: Sequence[Task]) -> list[float]:
        """Starts a worker for each core first."""
        self.ray.get([self.hold.remote(0.5) for _ in range(self.cores)])
        return super().mixed(tasks)


class Dask(Peer):
    """`distributed.LocalCluster` with a process of one thread for each core. Commands, and
    functions in `chunks`, go in one `Client.map`. For the mixed tasks, one worker process has the
    abstract resource `cores`, and a thread for each."""

    name = "Dask"
    packages = ("distributed",)
    lacks = {"sandboxed": NO_SANDBOX}

    def start(self) -> None:
        """Starts scheduler and workers."""
        from distributed import Client, LocalCluster
        mixed = self.cores > 2
        self.cluster = LocalCluster(
            n_workers=1 if mixed else self.cores, threads_per_worker=self.cores if mixed else 1,
            dashboard_address=None, local_directory=str(self.folder),
            resources={"cores": self.cores} if mixed else None)
        self.client = Client(self.cluster)

    def stop(self) -> None:
        """Ends all of it."""
        self.client.close()
        self.cluster.close()

    def functions(self, count: int) -> None:
        """One `submit` each; `pure=False`, so that no result is taken from the cache."""
        done([self.client.submit(work.noop, i, pure=False) for i in range(count)])

    def chunks(self, count: int) -> None:
        """One `map`, one `gather`."""
        self.client.gather(self.client.map(work.noop, range(count), pure=False))

    def commands(self, count: int) -> None:
        """One `map` of the function that runs the program."""
        self.client.gather(self.client.map(work.true, range(count), pure=False))

    def one(self) -> None:
        """One function."""
        self.client.submit(work.noop, 1, pure=False).result()

    def sized(self, task: Task, ended: Callable[[Any], None]) -> None:
        """A function with resources."""
        future = self.client.submit(work.hold, task.seconds, pure=False,
                                    resources={"cores": task.cores})
        self.kept.append(future)  # a future that nobody holds is cancelled
        future.add_done_callback(ended)

    def mixed(self, tasks: Sequence[Task]) -> list[float]:
        """As the others."""
        self.kept: list[Any] = []
        return super().mixed(tasks)


class Parsl(Peer):
    """HighThroughputExecutor with one block on this machine, encrypted as shipped, and
    `prefetch_capacity` as its page advises for many short tasks. An app call for each function."""

    name = "Parsl"
    packages = ("parsl",)
    lacks = {"mixed": f"{NO_CORES}: its executor refuses `cores`", "sandboxed": NO_SANDBOX,
             "chunks": "it has no call for many functions"}

    def start(self) -> None:
        """Starts interchange and manager."""
        import parsl
        from parsl.executors import HighThroughputExecutor
        from parsl.providers import LocalProvider
        block = LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1)
        self.kernel = parsl.load(parsl.Config(
            executors=[HighThroughputExecutor(
                label="htex", address="127.0.0.1", max_workers_per_node=self.cores,
                prefetch_capacity=100, provider=block)],
            run_dir=str(self.folder), initialize_logging=False, strategy="none"))
        self.noop, self.true = parsl.python_app(work.noop), parsl.python_app(work.true)

    def stop(self) -> None:
        """Ends all of it."""
        import parsl
        self.kernel.cleanup()
        parsl.clear()

    def functions(self, count: int) -> None:
        """An app call each."""
        done([self.noop(i) for i in range(count)])

    def commands(self, count: int) -> None:
        """A Python app that runs the program: a bash app starts a shell as well."""
        done([self.true(i) for i in range(count)])

    def one(self) -> None:
        """One call."""
        self.noop(1).result()


class HyperQueue(Peer):
    """Its wheel's `LocalCluster`, and all tasks of a burst in one job, as its documentation
    advises. Programs run without files for their output. Its functions return nothing and start a
    Python process each. `wait_for_jobs` looks once a second, so the last task of a burst, and each
    mixed task, writes down its own end; what the return would cost is not counted. Only the idle
    round trip is that of the API."""

    name = "HyperQueue"
    packages = ("hyperqueue",)
    lacks = {"chunks": "one job is its way of submission: see the functions",
             "sandboxed": NO_SANDBOX}

    def start(self) -> None:
        """Starts server and worker."""
        from hyperqueue import LocalCluster
        from hyperqueue.cluster import WorkerConfig
        from hyperqueue.task.function import PythonEnv
        self.cluster = LocalCluster(str(self.folder))
        self.cluster.start_worker(WorkerConfig(cores=self.cores))
        self.client = self.cluster.client(python_env=PythonEnv(python_bin=sys.executable))

    def stop(self) -> None:
        """Ends all of it."""
        self.cluster.stop()

    def functions(self, count: int) -> float:
        """One job of functions."""
        job = self._job()
        for i in range(count):
            job.function(work.noop, args=(i,), stdout=None, stderr=None)
        return self._run(job)

    def commands(self, count: int) -> float:
        """One job of programs."""
        job = self._job()
        for _ in range(count):
            job.program([work.TRUE], stdout=None, stderr=None)
        return self._run(job)

    def one(self) -> None:
        """A job of one function."""
        job = self._job()
        job.function(work.noop, args=(1,), stdout=None, stderr=None)
        self.client.wait_for_jobs([self.client.submit(job)])

    def mixed(self, tasks: Sequence[Task]) -> list[float]:
        """A job for each task when it arrives; each writes its end into a file of its own."""
        from hyperqueue.ffi.protocol import ResourceRequest
        submitted, began, wall = [], time.perf_counter(), time.time()
        for number, task in enumerate(tasks):
            time.sleep(max(0.0, began + task.at_s - time.perf_counter()))
            job = self._job()
            job.program(["/bin/sh", "-c", f"sleep {task.seconds}; : > {self.folder}/end{number}"],
                        stdout=None, stderr=None, resources=ResourceRequest(cpus=task.cores))
            submitted.append(self.client.submit(job))
        self.client.wait_for_jobs(submitted)
        return [(self.folder / f"end{number}").stat().st_mtime - wall - task.at_s
                for number, task in enumerate(tasks)]

    def _run(self, job: Any) -> float:
        end = self.folder / "end"
        job.program(["/usr/bin/touch", str(end)], stdout=None, stderr=None)
        began = time.time()
        self.client.wait_for_jobs([self.client.submit(job)])
        return end.stat().st_mtime - began

    def _job(self) -> Any:
        from hyperqueue import Job
        return Job(default_workdir=self.folder)
