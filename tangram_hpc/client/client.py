"""`Client`: the class through which a trainer uses the package.

A client owns one connection to the broker and the parts that work over it: service calls, rollout
calls and the source of endpoint grants. Each part gets the connection; none of them knows the
client. `connection.py` keeps the open actions and sessions, and reconnects when a channel is lost.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..config.endpoints import endpoint_spec
from ..config.rollouts import RolloutPoolSettings
from ..config.services import Service
from ..domain.action import Profile
from ..domain.session import SessionSpec
from ..errors import InvalidInput, TangramError
from ..ports import Dial, DirectTransport, Store
from ..protocol import message as ms
from .actions import submit
from .connection import Connection
from .direct.direct_calls import DirectCalls
from .endpoints.endpoint import Endpoint
from .endpoints.grants import GrantSource
from .future import Future
from .request import (
    Cpus,
    Options,
    Reach,
    Secrets,
    Work,
    check_text,
    secret_values,
    session_spec,
    utf8,
)
from .rollouts import RolloutCalls, make_turn
from .service_calls import ServiceCalls
from .session import Session, open_session
from .session_handle import SessionHandle, read_handle
from .snapshots.listing import SnapshotInfo, listed, removed
from .snapshots.prepared import PreparedEnvironments
from .terminals.pty import Pty, open_pty


class Client:
    """A connection to one job's broker; made by `tangram_hpc.connect` and `LocalCluster`.

    All methods may be called from any thread. Use the client as a context manager, or call `close`.
    A client belongs to the process that made it: a copy in the child of a fork raises ClientClosed.

    Args:
        dials: ways to the broker, best first. Each opens a fresh channel or raises a TangramError.
            After a loss they are tried again until the broker's grace is over.
        job: the job's name.
        make_store: opens the job's store by the name that the broker tells.
        name: the client's name in `tangram info`; empty for "host:pid".
        rank: this process's rank in the trainers' MPI world; -1 outside of one.
        size: the number of ranks of that world; 0 outside of one.
        connect_s: how long to wait for the broker's first answer, in seconds.
        again: a Python call that connects from another process, for messages.
        back_within_s: how long to try the dials at first, in seconds, as for a broker that is being
            started again.
        tenant: the tenant for which all that the client does counts; empty for the default one.
        direct: how its direct calls are served; None if they go through the broker.

    Attributes:
        job, name, rank, size: as above.

    Raises:
        BrokerUnreachable: the broker did not answer.

    Example:
        with tangram_hpc.connect() as client:
            print(client.submit(["pytest", "-q"], cpus=(1, 8), timeout=60).result().text)
    """

    def __init__(self, dials: Sequence[Dial], job: str, make_store: Callable[[str], Store],
                 name: str = "", rank: int = -1, size: int = 0, connect_s: float = 30.0,
                 again: str = "tangram_hpc.connect()", back_within_s: float = 0.0,
                 tenant: str = "", direct: DirectTransport | None = None) -> None:
        self.job, self.name, self.rank, self.size = job, name, rank, size
        self._connection = Connection(dials, job, make_store, name, rank, size, connect_s, again,
                                      back_within_s, tenant)
        self._direct = direct
        self._services = ServiceCalls(self._connection)
        self._rollouts = RolloutCalls(self._connection)
        self._grants = GrantSource(self._connection)
        self._environments = PreparedEnvironments(self._connection, self.session)

    @property
    def welcome(self) -> ms.Welcome | None:
        """What the broker said when it last accepted this client: its settings `grace_s`, `sync`
        and others."""
        return self._connection.welcome

    @property
    def output_bound(self) -> int:
        """The largest `output_max` that a command may have here, in bytes; a larger one is refused.
        """
        assert self._connection.welcome is not None  # the client has connected
        return self._connection.welcome.output_bound

    @property
    def via(self) -> str:
        """The kind of channel in use: "socket" or "mpi"; empty while there is none."""
        return self._connection.via

    @property
    def failure(self) -> TangramError | None:
        """Why nothing can be submitted any more, such as BrokerUnreachable after the broker's
        grace; None while actions can be submitted."""
        return self._connection.failure

    # ---- actions -----------------------------------------------------------------------------

    def submit(self, work: Work, *args: Any, cpus: Cpus = 1, mem: int | str = 0, gpus: int = 0,
               session: Session | None = None, timeout: float | None = None, name: str = "",
               retries: int | None = None, resizable: bool = True, component: str = "",
               profile: Profile | None = None, kwargs: Mapping[str, Any] | None = None,
               trusted: bool = False, endpoint: str = "", cwd: str = "",
               env: Mapping[str, str] | None = None, stdin: bytes | str = b"",
               files: Mapping[str, bytes | str] | None = None,
               on_output: Callable[[int, bytes], None] | None = None,
               clean_env: bool = True, once: str = "",
               trajectory: str | int | None = None, output_max: int = 0,
               keep: str = "head", user: str | int = "", real_user: bool = False) -> Future:
        """Submits one action, a command or a Python function; returns at once.

        Args:
            work: an argv list, a line for the shell, or a function. A function is called with
                `args` and `kwargs` in a runner process; it is uploaded at its first use.
            cpus: CPUs: `4`, `(1, 8)` for any number in between, `[1, 2, 4]` for one of these.
            mem: memory that the action holds while it runs, in MiB or as "2G"; in a session, in
                addition to the session's.
            gpus: whole GPUs that the action holds while it runs.
            session: the session in which it runs; None for none.
            timeout: the longest run time, in seconds; waiting does not count. None for no limit.
            name: the class of the action in accounting and run time estimates; guessed if empty.
            retries: how often the action is started again after a node failure. None means 2, but 0
                in a session (whose state is lost) and with an endpoint (it may have been called).
            resizable: whether its number of CPUs may change while it runs.
            component: the het component or partition on which it must run; empty for any.
            profile: its run time, if you know it; otherwise it is learned.
            trusted: for a command without a session: the command is your own and may see your
                files. For a function: its result may be unpickled here; do not say so for a
                function that runs a model's code, which could forge such a result.
            endpoint: an endpoint that the action calls; it then holds a slot of it and no CPU.
            cwd, env, stdin, files: for commands. `files` (path -> content) are written first.
            on_output: called by the client's thread with (1 or 2, bytes) for each piece of stdout
                or stderr. If it raises, the error is logged, and it is not called again.
            clean_env: whether a command's environment is the sandbox's with `env` on top; False for
                exactly `env`.
            once: an idempotency key. Work with the same key runs once in a job, requeues included,
                and its result is kept until `forget`. Empty for none.
            trajectory: the trajectory of which the action is a tool, see `rollout`. None for that
                of its session.
            output_max: for commands: how many bytes of stdout and of stderr are kept, at most
                `Client.output_bound` (64 MiB unless the site says otherwise). 0 for the site's
                `output_max` (1 MiB).
            keep: for commands: which bytes of longer output are kept: "head", "tail" or "both"
                (half of them from each end).
            user: the user of a command in a session with an image, a name or a number; empty for
                the session's. HOME, USER and LOGNAME become that user's. The number becomes that
                user's too where the node gives sessions several users; elsewhere it stays 0.
            real_user: whether the command fails instead, where it could not have that number.

        Returns:
            A Future of an ExecResult (also for a command that fails) or of the function's value.
            It raises RemoteError if the function raised, ActionFailed if the action could not be
            served, and InfeasibleRequest if it never can be.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
            ClientClosed, BrokerUnreachable: the client was closed or has lost its broker.
        """
        record = None
        if session is not None:
            if not isinstance(session, Session):
                raise self._connection.failure or InvalidInput(
                    f"session: {session!r:.60} is not what `Client.session` returned")
            record = session._record
        return submit(self._connection, work, args, record, cpus, mem, gpus, timeout, name, retries,
                      resizable, component, profile, kwargs, trusted, endpoint, cwd, env, stdin,
                      files, on_output, clean_env, once, trajectory, output_max, keep, user,
                      real_user)

    def map(self, work: Work, *iterables: Iterable[Any], **options: Any) -> Iterator[Any]:
        """Submits `work` once for each tuple of items, all at once, and yields the results in
        order. Use `submit` in a loop for commands.

        Args:
            work: a function.
            iterables: its arguments; the shortest ends the tuples.
            options: arguments of `submit`, except `once`.

        Yields:
            Each function's value. Leaving the iterator early cancels the rest, and so does an
            argument that is refused.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            scores = list(client.map(grade, answers, references, cpus=2))
        """
        if options.get("once"):
            raise InvalidInput("once: each action has a name of its own; use `submit` in a loop")
        futures: deque[Future] = deque()

        def results() -> Generator[Any, None, None]:
            try:
                yield None  # taken below, so that the rest is cancelled if nothing is taken
                while futures:
                    yield _value_of(futures.popleft())
            finally:
                for future in futures:
                    future.cancel()

        iterator = results()
        next(iterator)
        try:
            for items in zip(*iterables, strict=False):
                futures.append(self.submit(work, *items, **options))
        except BaseException:
            iterator.close()  # cancels what was submitted before
            raise
        return iterator

    def direct(self, *, cpus: Cpus = 1, mem: int | str = 0, gpus: int = 0, component: str = "",
               name: str = "direct", trusted: bool = False, timeout: float | None = None,
               retries: int = 2, idle_s: float = 0.5, term_s: float = 10.0) -> DirectCalls:
        """Prepares a stream of short calls of functions that go straight to a process on a node,
        one after the other; returns at once. One action holds the CPUs for the stream.

        A call takes a fraction of the time that `submit` takes, and a flood of other clients'
        actions hardly delays it. Use `submit` or `map` for many calls at once, and for calls of
        more than some milliseconds: their CPUs are held only while they run.

        Args:
            cpus, mem, gpus, component: as for `submit`. They are held from the first call on, until
                `close`, for `idle_s` after the last call, or for `term_s`; after that the next call
                waits for them again, as any action does.
            name: the name of these actions in accounting.
            trusted: whether results may be unpickled here, as for `submit`.
            timeout: the longest run time of one call, in seconds; None for no limit.
            retries: how often a call is sent again after a failure of its node.
            idle_s: how long the CPUs are held without a call, in seconds.
            term_s: after so many seconds the action ends with the call that runs then, so that
                others get their turn.

        Returns:
            The stream. Where the node cannot connect to this process, its calls go through the
            broker, as functions that are submitted; its `reason` then says why.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            with client.direct() as direct:
                for action in actions:
                    state = direct.call(step, state, action)
        """
        return DirectCalls(self._connection, self._direct,
                           Options(cpus, mem, gpus, name=name, component=component,
                                   trusted=trusted), timeout, retries, idle_s, term_s)

    def forget(self, *names: str, prefix: str = "") -> int:
        """Lets the broker drop the kept results of idempotency keys. Call it when a checkpoint
        holds the results: afterwards, work that is submitted with the same keys runs again. Keys of
        actions that have not ended are kept.

        Args:
            names: keys, as they were given to `once`.
            prefix: also every key that begins with it; empty for none.

        Returns:
            How many results were dropped.

        Raises:
            BrokerUnreachable: no answer came within 10 s.
        """
        answer = self._connection.request(lambda request: ms.Forget(request, names, prefix))
        return int(answer["forgotten"])

    def pty(self, command: Sequence[str] | str, **options: Any) -> Pty:
        """Runs a command, outside of a session, on a terminal of its own; returns at once.

        Args:
            command, options: as for `Session.pty`, and `component` and `trusted` of `submit`.

        Returns:
            The terminal, to write to and to read from.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        return open_pty(self._connection, None, command, **options)

    # ---- sessions ----------------------------------------------------------------------------

    def session(self, *, mem: int | str = 0, disk: int | str = 0, backend: str = "",
                image: str = "", network: Reach = False, trusted: bool = False,
                background: str = "stop", env: Mapping[str, str] | None = None,
                files: Mapping[str, bytes | str] | None = None, idle_s: float = 0,
                grace_s: float | None = None, name: str = "", component: str = "",
                movable: bool = False, trajectory: str | int = "", shared: bool = False,
                outlives: bool = False, ttl_s: float = 0, secrets: Secrets = (),
                background_cpus: Cpus | None = None, writable: bool = True,
                user: str | int = "", snapshot: str = "", token: str = "") -> Session:
        """Opens a session, a stateful sandbox; returns at once. `with client.session() as s:` (or
        `async with`) waits for its admission.

        Args:
            mem: memory that the session holds from open to close, in MiB or as "2G".
            disk: the most space that its files may take, likewise; 0 for the site's default.
            backend: "process", "bwrap", "podman", "apptainer" or "enroot"; empty for the best that
                the node has.
            image: the image of its file system: "[registry/]name[:tag][@sha256:...]", or the path
                of a `.sif` file, squashfs, layout, archive or folder; empty: the node's own files.
            network: what it may reach (docs/SANDBOXES.md): False nothing, True what its node does,
                "open" that without the node's loopback, a list what it names, by a proxy.
            trusted: whether its code is your own and may see your files. An untrusted session is
                refused where no node can keep it from them.
            background: what happens to background processes between actions: "stop" (they are
                stopped), "share" (they share a small part of one CPU), "end" (they are killed with
                their action) or "run" (CPUs are leased for them while one of them can run).
            env: environment variables of all its commands; each command's own go on top.
            files: path -> content; written before anything else happens in it.
            idle_s: the session is closed after so many seconds in which no action of it waited or
                ran and nobody renewed it; 0 for never.
            grace_s: how many seconds the session outlives the loss of this client; None for the
                broker's setting.
            name: its name in listings. The name of a shared session is unique in the job while the
                session is open, and is chosen if empty.
            component: the het component or partition on which it must be; empty for any.
            movable: whether its files are all that it needs, so that it moves when its node drains.
            trajectory: the trajectory whose tools run in it, see `rollout`; empty for none.
            shared: whether other clients of the job may attach to it, see `attach`.
            outlives: whether it stays open when this client goes away. It needs `shared`, and
                `ttl_s` or `idle_s`, which ends it; with `background="run"` it needs `ttl_s`.
            ttl_s: it is closed so many seconds after it opened, whatever runs in it; 0 for never.
            secrets: names of secrets (`keep_secrets`) that its commands have as environment
                variables: a list, or a mapping of variables to names.
            background_cpus: with `background="run"`, the CPUs that may be leased for its background
                processes at a time: a number, or a pair (min, max) between which they follow the
                load as an action's do; None for 1.
            writable: whether it may write the root of its image, which no other session sees; its
                commands are user 0 then. Without an image it means nothing.
            user: the user of its commands, a name or a number of its image; each command may name
                another one. docs/SANDBOXES.md says what it means.
            snapshot: the name of the snapshot with whose files it begins, as `Session.snapshot` or
                `prepared` returned it. The session gets the snapshot's image; leave `image` out.
            token: the close token of a shared session, 32 characters or more; drawn if empty.

        Returns:
            The session.

        Raises:
            InvalidInput: an argument is wrong; the message names it.

        Example:
            with client.session(mem="1G", files={"main.c": source}) as session:
                session.exec("cc main.c -o main").result().check()
        """
        spec = session_spec(
            SessionSpec(0), mem=mem, disk=disk, backend=backend, image=image, network=network,
            trusted=trusted, background=background, idle_s=idle_s, grace_s=grace_s, name=name,
            component=component, movable=movable, outlives=outlives, ttl_s=ttl_s, secrets=secrets,
            background_cpus=background_cpus, writable=writable, user=user, snapshot=snapshot)
        return open_session(self._connection, spec, env, files, trajectory, shared, token)

    def attach(self, handle: SessionHandle | str | None = None, *, name: str = "",
               token: str = "", hold: bool = False, timeout_s: float = 10.0) -> Session:
        """Attaches to a session that another client of the job opened with `shared=True`. Waits for
        the broker's answer, not for the session's admission.

        The actions of several clients in one session run one at a time, by turns. What a client
        submits belongs to it: its results come to it alone, and when it goes away only its own
        actions are cancelled. `with client.attach(handle) as s:` detaches at the end.

        Args:
            handle: what `Session.handle` returned, or its text.
            name, token: the name and the token of the handle, instead of `handle`.
            hold: whether the session stays open for this client when the client that opened it is
                gone; needs a handle with `may_close`.
            timeout_s: how long to wait for the answer, in seconds.

        Returns:
            The session, on which everything works as for the client that opened it, but `close`
            unless the handle allows it.

        Raises:
            InvalidInput: no session of the job has this name and token, or an argument is wrong.
            SessionLost: the session has ended; the message says why.
            BrokerUnreachable: no answer came in time.

        Example:
            with client.attach(os.environ["SESSION"]) as session:
                verdict = session.exec("pytest -q tests", timeout=300).result()
        """
        known = read_handle(handle, name, token)
        if known.job not in ("", self.job):
            raise InvalidInput(f"handle: its session is of job {known.job}, and this client of job "
                               f"{self.job}; connect to that job")
        return Session(self._connection, self._connection.attach(known, hold, timeout_s), True)

    def snapshots(self) -> list[SnapshotInfo]:
        """Returns all snapshots of the job, with the nodes that have them and the space they take.

        Raises:
            BrokerUnreachable: no answer came within 10 s.
        """
        return listed(self._connection)

    def remove_snapshot(self, name: str) -> bool:
        """Removes a snapshot, so that no further session begins from it. Its files are removed when
        no session that began from it is open, and no snapshot of such a session is left.

        Args:
            name: the snapshot.

        Returns:
            Whether there was such a snapshot.

        Raises:
            BrokerUnreachable: no answer came within 10 s.
        """
        return removed(self._connection, name)

    def prepared(self, *, setup: Sequence[Sequence[str] | str] = (),
                 files: Mapping[str, bytes | str] | None = None, timeout: float = 3600.0,
                 **options: Any) -> str:
        """Returns the name of a snapshot in which some set-up steps have run. Blocks until the
        snapshot exists. It is made once in a job: callers that ask for the same environment
        meanwhile wait for the caller that makes it, and later callers get it at once.

        Args:
            setup: commands, each an argv list or a line for the shell. They run in this order in a
                fresh session; each must succeed.
            files: path -> content; written before the first step.
            timeout: the longest run time of one step, in seconds. Waits for a node have no limit,
                and whoever waits for another client waits as long as that one is connected.
            options: arguments of `Client.session` for the session in which the steps run, such as
                `image`, `network`, `env`, `mem` or `user`. Two environments are the same if these,
                `setup` and `files` are equal. A snapshot holds only files and the image: repeat the
                other options for your sessions.

        Returns:
            The name, for `Client.session(snapshot=...)`. A snapshot that is not used may be removed
            at some time, so call `prepared` again for each group of sessions.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
            SetupFailed: a step failed, in this client or in the client that made the snapshot.

        Example:
            env = client.prepared(image="python:3.12", setup=["pip install -r /r.txt"],
                                  files={"/r.txt": "pytest"}, network=True)
            group = [client.session(snapshot=env, mem="1G") for _ in range(16)]
        """
        return self._environments.prepared(setup, files, timeout, options)

    def keep_secrets(self, values: Mapping[str, str | None]) -> None:
        """Writes secrets, such as tool keys, into a private file of the job's folder, from where
        the workers give them to sessions that were opened with `secrets`. They are in no message,
        journal, log or record. Blocks; sessions that are open keep the values that they have.

        Args:
            values: name -> value; a value of None removes the secret. A name has letters, digits
                and underscores.

        Raises:
            InvalidInput: a name or a value cannot be used, or the file cannot be written.

        Example:
            client.keep_secrets({"SEARCH_KEY": os.environ["SEARCH_KEY"]})
            session = client.session(secrets=["SEARCH_KEY"])
        """
        self._connection.store.keep_secrets(secret_values(values))

    # ---- services and rollout pools ----------------------------------------------------------

    def register_service(self, name: str, service: Service | Mapping[str, Any]) -> None:
        """Declares a GPU service, such as a reward model, a judge or a teacher. The service is
        loaded once, parked in host memory and brought to GPUs when `call` needs it. Declaring the
        same service again is harmless.

        Args:
            name: the service's name.
            service: its fields, as in `[services.NAME]` of the settings file.

        Raises:
            InvalidInput: a field is wrong; the message names it.
            InfeasibleRequest: no node can serve it, or there are too many services.

        Example:
            client.register_service("judge", {"backend": "torch", "model": "/models/judge"})
            client.call("judge", "score", texts=["an answer"]).result()
        """
        self._services.register(name, service)

    def call(self, service: str, method: str, *, tokens: int = 0, timeout: float | None = None,
             retries: int | None = None, name: str = "", component: str = "", once: str = "",
             trajectory: str | int = "", **arguments: Any) -> Future:
        """Calls a service; returns at once.

        Args:
            service: the service's name.
            method: what the service offers: `score(texts=...)`, `logprobs(prompts=...,
                completions=...)`, `generate(prompts=..., max_new_tokens=...)` or a method of its
                engine.
            tokens: how many tokens the call has, for the token limit of a batch; 0 for a guess.
            timeout: the longest run time, in seconds; waiting and bringing the service to its GPUs
                do not count. None for no limit.
            retries: how often it is started again after a node failure; None for 2.
            name: the class of the action in accounting; empty for "service.method".
            component: the het component or partition it must run on; empty for any.
            once, trajectory: as for `submit`.
            arguments: the method's arguments: plain values and arrays.

        Returns:
            A Future of the service's answer. It raises RemoteError if the service refused the call
            and ActionFailed if the call could not be served.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        return self._services.call(service, method, tokens, timeout, retries, name, component,
                                   once, trajectory, arguments)

    def register_rollouts(self, name: str, pool: RolloutPoolSettings | Mapping[str, Any]) -> None:
        """Declares a rollout pool over services that are declared: buckets of services, by how many
        tokens a trajectory has left. Declaring the same pool again is harmless.

        Args:
            name: the pool's name.
            pool: its fields, as in `[rollouts.NAME]` of the settings file.

        Raises:
            InvalidInput: a field is wrong, a service is not declared, or the name is in use with
                another pool.
        """
        self._rollouts.register(name, pool)

    def rollout(self, pool: str, method: str, *, trajectory: str | int, prompt: int | str,
                context: int, generated: int, tokens: int = 0, timeout: float | None = None,
                retries: int | None = None, name: str = "", once: str = "",
                **arguments: Any) -> Future:
        """Runs one turn of a trajectory on the service of a pool that suits it best; returns at
        once. The turns of one trajectory run one after another.

        Args:
            pool: the pool's name.
            method, arguments: as for `call`.
            trajectory: your name of the trajectory; another client may use the same name for
                another one. Actions submitted with the same `trajectory` are its tools: how they
                end lets the broker estimate how much of it is left.
            prompt: the prompt with which the trajectory began, as a number below 2**62 or a text.
                All samples of one prompt give the same value.
            context: tokens with which this turn begins, prompt and returns of tools included.
            generated: tokens that the policy has generated in this trajectory so far.
            tokens, timeout, retries, name, once: as for `call`.

        Returns:
            A Future of the service's answer; its `route` says where the turn went and why. Besides
            what `call` raises, it raises InfeasibleRequest if the context fits on no service of the
            pool, or none of those that it fits on can run on the nodes.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        turn = make_turn(pool, trajectory, prompt, context, generated)
        options = Options(1, 0, 0, timeout, name or f"{pool}.{method}", retries, True,
                          once=once, turn=turn)
        return self._rollouts.submit(turn, method, tokens, options, arguments)

    def tool_returned(self, pool: str, trajectory: str | int, tool: str, characters: int,
                      status: str = "success") -> None:
        """Reports the return of a tool that did not run through the broker. Call it before the
        trajectory's next turn; returns at once.

        Args:
            pool: the pool's name.
            trajectory: as for `rollout`.
            tool: the tool's name.
            characters: how many characters it returned.
            status: "success", "failure" or "timeout".

        Raises:
            InvalidInput: an argument is wrong, or the pool is not declared.
        """
        self._rollouts.tool_returned(pool, trajectory, tool, characters, status)

    def trajectory_ended(self, pool: str, trajectory: str | int, tokens: int | None = None, *,
                         epoch: int | None = None) -> None:
        """Reports the end of a trajectory; returns at once. A turn that is still open goes on.

        Args:
            pool: the pool's name.
            trajectory: as for `rollout`.
            tokens: how many tokens the policy generated in all, from which the pool learns. None
                for a trajectory that was cut off, from which it learns nothing.
            epoch: the train step, or another number that grows with it, by which old lengths are
                forgotten. None for the epoch of the last trajectory that named one.

        Raises:
            InvalidInput: an argument is wrong, or the pool is not declared.
        """
        self._rollouts.trajectory_ended(pool, trajectory, tokens, epoch)

    # ---- endpoints ---------------------------------------------------------------------------

    def register_endpoint(self, name: str, *, concurrency: int = 64, rate: float = 0.0,
                          burst: float | None = None, jitter_ms: float = 50.0,
                          **options: Any) -> Endpoint:
        """Declares an API of somebody else and its quota, for all clients of this job; returns when
        the broker has taken it. Declaring the same endpoint again is harmless.

        Args:
            name: the endpoint's name.
            concurrency: the most calls at once.
            rate: the most calls per second; 0 for no limit.
            burst: the most calls at once after a pause; None for as many as `rate` allows in one
                second.
            jitter_ms: by how many milliseconds the network may delay one call more than another.
                The broker keeps the burst smaller by the calls of that time, so that the endpoint
                never sees more than its quota.
            options: other arguments of `endpoint`, for the Endpoint that is returned.

        Returns:
            The endpoint, for calls from this process.

        Raises:
            InvalidInput: a field is wrong, or the name is in use with another quota.

        Example:
            search = client.register_endpoint("search", concurrency=8, rate=20)
            with search.slot():
                answer = requests.get(url)
        """
        spec = endpoint_spec(name, {
            "concurrency": concurrency, "rate": rate, "burst": burst, "jitter_ms": jitter_ms})
        self._connection.request(lambda request: ms.DeclareEndpoint(request, spec))
        return self.endpoint(name, **options)

    def endpoint(self, name: str, *, cache: int = 0, cache_s: float = 300.0,
                 single_flight: bool = False, rng: random.Random | None = None) -> Endpoint:
        """Returns an endpoint that any client or the broker's settings file has declared.

        Args:
            name: the endpoint's name.
            cache: how many answers of `request(key=...)` this process keeps and returns again; 0
                for none. A cache changes the data that a policy trains on: all requests with one
                key get the same answer, where the endpoint might have given different ones.
            cache_s: for how long an answer is kept, in seconds.
            single_flight: whether requests with one key at the same time share one call, with its
                answer or its failure. This changes the training data in the same way as a cache.
                The call goes on when one of its callers goes away.
            rng: where the pauses between attempts are drawn from; None for a generator of its own.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
        """
        return Endpoint(self._grants, name, cache=cache, cache_s=cache_s,
                        single_flight=single_flight, rng=rng)

    # ---- the broker --------------------------------------------------------------------------

    def ask(self, what: str, argument: str = "", timeout_s: float = 10.0) -> Any:
        """Asks the broker about its state and waits for the answer.

        Args:
            what: the query: "info", "nodes", "pending", "services", "sessions", "rollouts",
                "queue", "top" or "explain".
            argument: for "explain", the id of an action or a session; for "pending", the id of an
                action, or nothing for the first 1,000 that wait; for "queue", what to choose, such
                as `limit=100&state=PENDING&name=pytest`, or nothing for the first 1,000.
            timeout_s: how long to wait for the answer, in seconds.

        Returns:
            The answer as plain values, as `tangram info --json` and the like print it.

        Raises:
            InvalidInput: the broker does not know the query, or `timeout_s` is no time.
            BrokerUnreachable: no answer came in time.
        """
        return self._connection.ask(what, argument, timeout_s)

    def metrics(self, prefix: str = "tangram/", timeout_s: float = 10.0) -> dict[str, float]:
        """Returns metrics for a trainer's logger: of this client's actions that ended since the
        last call, and of the present state of the job. Call it once a step. It costs one query.

        The names are always the same. `docs/METRICS.md` lists them: counts and mean times of
        `tools/`, `services/`, `rollouts/` and `endpoints/`, and the gauges of `job/`.

        Args:
            prefix: the text that is put before every name.
            timeout_s: how long to wait for the broker's answer, in seconds.

        Returns:
            Name -> value. Times are in seconds. The mean of no actions is 0.

        Raises:
            InvalidInput: an argument is wrong; the message names it.
            BrokerUnreachable: no answer came in time; the next call counts the actions since the
                last call that succeeded.
            ClientClosed: the client was closed.

        Example:
            for name, value in client.metrics().items():
                writer.add_scalar(name, value, step)
        """
        check_text(prefix, "prefix")
        info = self._connection.ask("info", timeout_s=timeout_s)  # before a window is taken
        return self._connection.windows.read(info, prefix)

    def shutdown_broker(self, reason: str = "") -> None:
        """Asks the broker to end in order; returns at once. What still runs is killed.

        Args:
            reason: one line for its log and its clients.

        Raises:
            InvalidInput: `reason` is not UTF-8.
            ClientClosed, BrokerUnreachable: the client was closed or has lost its broker.
        """
        utf8(reason, "reason")
        self._connection.send(ms.Shutdown(reason), must_be_open=True)

    def close(self) -> None:
        """Closes the client. The broker cancels what is still open, and its futures raise
        ClientClosed. A second call does nothing."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        self._connection.__reduce__()


def _value_of(future: Future) -> Any:
    """Returns the future's value, or raises its error without a reference to the future, which
    would be a cycle; a future that has not ended, because the wait was interrupted, is cancelled.
    """
    try:
        return future.result()
    finally:
        future.cancel()
        del future
