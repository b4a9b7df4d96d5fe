"""The sandboxes of the E2B wire: each is a shared session of the job, with an owner and an end.

A sandbox's session outlives this server. Its record (`records`) lets another server find it again.
The client may move the sandbox's end at any time, but a session's time-to-live is fixed. So the
server itself closes the session at the sandbox's end. The session's own bounds are for the case
that no server is left: it ends after `IDLE_S` without renewal, and in any case `longest_s` after
its opening.

All methods are for one event loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ... import (
    BrokerUnreachable,
    Client,
    ClientClosed,
    InfeasibleRequest,
    InvalidInput,
    Session,
    SessionLost,
    TangramError,
)
from .images import E2bOptions, Wanted, wanted
from .processes import Processes
from .records import RecordFolder, SandboxRecord
from .wire_errors import ApiError, RpcError, as_rpc_error

IDLE_S = 900.0  # how long a sandbox without a server stays open while nothing runs in it
RENEW_S = IDLE_S / 3
ADMISSION_S = 50.0  # how long a creation waits for a node; clients give up after 60 s
KEYS_MAX = 4096  # idempotency keys of creations that are remembered
FORKS_MAX = 64


class Sandbox:
    """One sandbox; made by `SandboxRegistry`.

    Attributes:
        record: its record, which is also in the job's folder.
        session: its session.
        processes: the commands that run in it.
        timer: the timer that ends it; None before it is set.
        watchers: the folders that clients watch, by the watchers' ids on the wire.
        failure: ends the streams of watched folders; None as long as this server serves.
    """

    def __init__(self, record: SandboxRecord, session: Session, image: bool) -> None:
        self.record, self.session = record, session
        self.processes = Processes(session, record.cpus, image)
        self.timer: asyncio.TimerHandle | None = None
        self.watchers: dict[str, Any] = {}
        self.failure: RpcError | None = None

    @property
    def id(self) -> str:
        """Its id on the wire."""
        return self.record.id

    def told(self, error: TangramError) -> RpcError:
        """Returns the error of this wire for an error of the job."""
        return as_rpc_error(error, self.id)

    def accepts(self, token: str) -> bool:
        """Returns whether a token is the sandbox's access token."""
        return hmac.compare_digest(token.encode(errors="replace"),
                                   self.record.access_token.encode())

    @property
    def traffic_token(self) -> str:
        """The token that its client sends to a port of the sandbox, where it may run code."""
        return hashlib.sha256(f"traffic:{self.record.access_token}".encode()).hexdigest()

    def signed(self, path: str, verb: str, user: str, expires: str, signature: str) -> bool:
        """Returns whether a signature lets its holder read or write one file. By E2B's rule it is a
        hash of the file's path, the verb, the user, the access token and the time of expiry."""
        parts = [path, verb, user, self.record.access_token, *([expires] if expires else [])]
        digest = hashlib.sha256(":".join(parts).encode(errors="replace")).digest()
        right = "v1_" + base64.b64encode(digest).decode().rstrip("=")
        if expires and not (expires.isascii() and expires.isdigit() and len(expires) < 16
                            and int(expires) >= time.time()):
            return False
        return hmac.compare_digest(signature.encode(errors="replace"), right.encode())


class SandboxRegistry:
    """All sandboxes that this server knows.

    Args:
        client: the client of the job that opens the sessions.
        options: what the server allows.
        folder: the records of the job's sandboxes.
    """

    def __init__(self, client: Client, options: E2bOptions, folder: RecordFolder) -> None:
        self.options = options
        self._client, self._folder = client, folder
        self._open: dict[str, Sandbox] = {}
        self._left: list[Processes] = []  # of the sandboxes that were open when this server left
        # creations by owner and idempotency key; the oldest comes first
        self._created: dict[tuple[str, str], asyncio.Task[Sandbox]] = {}
        self._finding: dict[str, asyncio.Task[Sandbox | None]] = {}
        self._kept: set[asyncio.Task[None]] = set()

    # ---- making ----

    async def create(self, owner: str, template: str, timeout_s: int, *, key: str = "",
                     metadata: Mapping[str, str], env: Mapping[str, str],
                     network: bool = True) -> Sandbox:
        """Makes a sandbox and waits until it is admitted.

        Args:
            owner: the name of the client whose key was sent.
            template: the template that the client names.
            timeout_s: the time after which the sandbox is closed, in seconds.
            key: an idempotency key: a second call with the same key gets the same sandbox; empty
                for none.
            metadata: notes of the client about the sandbox; `images.wanted` reads some of them.
            env: environment variables of all its commands.
            network: whether the client wants the network, which it gets if the server allows it.

        Raises:
            ApiError: the sandbox cannot be made; with status 503 if no node had room in time.
        """
        asked = wanted(self.options, template, metadata)
        self.check_timeout(timeout_s)
        if not key:
            return await self._create(owner, asked, timeout_s, metadata, env, network)
        task = self._created.get((owner, key))
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.ensure_future(
                self._create(owner, asked, timeout_s, metadata, env, network))
            self._created[owner, key] = task
            if len(self._created) > KEYS_MAX:
                del self._created[next(iter(self._created))]
        return await asyncio.shield(task)

    def check_timeout(self, timeout_s: int) -> None:
        """Raises ApiError if a sandbox may not live so long."""
        if not 0 < timeout_s <= self.options.longest_s:
            raise ApiError(400, f"timeout: {timeout_s} is not from 1 to {self.options.longest_s} "
                                "seconds (--e2b-longest of this server)")

    async def _create(self, owner: str, asked: Wanted, timeout_s: int,
                      metadata: Mapping[str, str], env: Mapping[str, str], network: bool
                      ) -> Sandbox:
        number = f"i{secrets.token_hex(10)}"
        network = network and self.options.network
        with _told_as_api_error():
            session = self._client.session(
                image=asked.image, mem=asked.memory, env=env, network=network, shared=True,
                name=f"e2b-{number}", outlives=True, ttl_s=self.options.longest_s, idle_s=IDLE_S,
                background="run", background_cpus=asked.cpus)
        now = time.time()
        record = SandboxRecord(number, owner, asked.template, "", secrets.token_urlsafe(24),
                               dict(metadata), asked.cpus, session.spec.mem_mib, network, now,
                               now + timeout_s, now + self.options.longest_s)
        return await self._admitted(record, session, bool(asked.image))

    async def _admitted(self, record: SandboxRecord, session: Session, image: bool) -> Sandbox:
        """Waits for the session's admission, and writes the sandbox's record."""
        try:
            with _told_as_api_error():
                await asyncio.wait_for(session.opened, ADMISSION_S)
                record.handle = session.handle(may_close=True).text
                await asyncio.to_thread(self._folder.write, record)
        except asyncio.TimeoutError:
            session.close()
            raise ApiError(503, f"no node had room for a sandbox within {ADMISSION_S:g} s; "
                                "`tangram info` shows what is open", retry_after_s=1) from None
        except OSError as error:
            session.close()
            raise ApiError(500, f"the sandbox's record: {error.strerror}") from None
        except BaseException:
            session.close()
            raise
        return self._add(record, session, image)

    def _add(self, record: SandboxRecord, session: Session, image: bool) -> Sandbox:
        sandbox = self._open[record.id] = Sandbox(record, session, image)
        loop = asyncio.get_running_loop()
        session.closed.add_done_callback(
            lambda _: loop.call_soon_threadsafe(self._ended, sandbox))
        self._schedule(sandbox)
        return sandbox

    async def fork(self, sandbox: Sandbox, timeout_s: int) -> Sandbox:
        """Makes a sandbox with a copy of another one's files. Its processes are not copied.

        Raises:
            ApiError: it cannot be made.
        """
        self.check_timeout(timeout_s)
        old, now = sandbox.record, time.time()
        number = f"i{secrets.token_hex(10)}"
        await sandbox.processes.make_room()
        with _told_as_api_error():
            session = sandbox.session.fork(
                shared=True, name=f"e2b-{number}", outlives=True, ttl_s=self.options.longest_s,
                idle_s=IDLE_S)
        record = SandboxRecord(number, old.owner, old.template, "", secrets.token_urlsafe(24),
                               dict(old.metadata), old.cpus, old.memory_mib, old.network, now,
                               now + timeout_s, now + self.options.longest_s)
        return await self._admitted(record, session, bool(session.spec.image))

    # ---- finding ----

    async def find(self, number: str, owner: str) -> Sandbox:
        """Returns a client's sandbox.

        Raises:
            ApiError: the client has no such sandbox, or it has ended.
        """
        sandbox = await self.known(number)
        if sandbox is None or sandbox.record.owner != owner:
            raise ApiError(404, f"sandbox {number!r:.40} not found")
        return sandbox

    async def known(self, number: str) -> Sandbox | None:
        """Returns a sandbox; None if it does not exist or has ended. A sandbox that another server
        has made is found by its record."""
        if (sandbox := self._open.get(number)) is not None:
            return sandbox
        task = self._finding.get(number)
        if task is None:
            task = self._finding[number] = asyncio.ensure_future(self._find(number))
            task.add_done_callback(lambda _: self._finding.pop(number, None))
        return await asyncio.shield(task)

    async def _find(self, number: str) -> Sandbox | None:
        record = await asyncio.to_thread(self._folder.read, number)
        return await self._adopt(record) if record is not None else None

    async def _adopt(self, record: SandboxRecord) -> Sandbox | None:
        try:
            session = await asyncio.to_thread(self._client.attach, record.handle)
        except (SessionLost, InvalidInput):
            await asyncio.to_thread(self._folder.remove, record.id)
            return None
        except TangramError:
            return None  # the broker is away; the next request tries again
        if record.id in self._open:
            session.detach()
            return self._open[record.id]
        return self._add(record, session, bool(session.spec.image))

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts two tasks: one takes over the sandboxes that earlier servers of the job have left,
        the other renews all sandboxes from time to time."""
        for work in (self._adopt_all(), self._renew()):
            self._keep(loop.create_task(work))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._kept.add(task)  # the loop itself keeps no reference to its tasks
        task.add_done_callback(self._kept.discard)

    async def _adopt_all(self) -> None:
        for record in await asyncio.to_thread(lambda: list(self._folder.all())):
            if record.id not in self._open:
                await self._adopt(record)

    def of(self, owner: str) -> Iterator[Sandbox]:
        """Yields the open sandboxes of a client."""
        return (each for each in self._open.values() if each.record.owner == owner)

    def found_by(self, test: Callable[[Sandbox], bool]) -> Sandbox | None:
        """Returns the sandbox of a request that names none, such as a signed URL. Tests all open
        sandboxes in turn."""
        return next((each for each in self._open.values() if test(each)), None)

    # ---- their ends ----

    async def set_end(self, sandbox: Sandbox, timeout_s: int, only_later: bool = False) -> None:
        """Moves a sandbox's end to `timeout_s` seconds from now.

        Args:
            sandbox: the sandbox.
            timeout_s: seconds from now.
            only_later: whether to leave an end that is already later as it is.

        Raises:
            ApiError: it may not live so long.
        """
        self.check_timeout(timeout_s)
        record, ends = sandbox.record, time.time() + timeout_s
        if only_later and ends <= record.ends:
            return
        if ends > record.latest + 1:
            left = max(0, int(record.latest - time.time()))
            raise ApiError(400, f"timeout: the sandbox may live for {left} more seconds at most "
                                "(--e2b-longest of this server)")
        record.ends = ends
        self._schedule(sandbox)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self._folder.write, record)

    def end(self, sandbox: Sandbox) -> None:
        """Closes a sandbox's session, and forgets the sandbox."""
        sandbox.session.close()
        self._ended(sandbox)

    def _ended(self, sandbox: Sandbox) -> None:
        if self._open.get(sandbox.id) is not sandbox:
            return
        del self._open[sandbox.id]
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.processes.end_all()
        if self._client.failure is None:
            self._folder.remove(sandbox.id)

    # ---- the end of this server ----

    def leave(self) -> None:
        """Ends the streams of all sandboxes, because this server ends. The sandboxes go on, and the
        next server of the job finds them."""
        ending = RpcError("unavailable", "this server ends; the sandbox goes on, and the next "
                                         "server of the job finds it")
        for task in self._kept:
            task.cancel()
        for sandbox in self._open.values():
            if sandbox.timer is not None:
                sandbox.timer.cancel()
            sandbox.failure = ending
            sandbox.processes.end_all(ending)
            self._left.append(sandbox.processes)  # the end of the client empties `_open`

    async def settled(self) -> None:
        """Returns when no thread will call the event loop any more for one of the sandboxes that
        `leave` has found. The job's client must have been closed."""
        for processes in self._left:
            await processes.settled()

    def _schedule(self, sandbox: Sandbox) -> None:
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.timer = asyncio.get_running_loop().call_later(
            max(0.0, sandbox.record.ends - time.time()), self._is_over, sandbox)

    def _is_over(self, sandbox: Sandbox) -> None:
        self._keep(asyncio.ensure_future(self._end_unless_moved(sandbox)))

    async def _end_unless_moved(self, sandbox: Sandbox) -> None:
        """Ends a sandbox, unless its record says that another server has moved its end."""
        record = await asyncio.to_thread(self._folder.read, sandbox.id)
        if record is not None and record.ends > time.time():
            sandbox.record.ends = record.ends
            self._schedule(sandbox)
        elif sandbox.record.ends <= time.time():
            with contextlib.suppress(TangramError):
                self.end(sandbox)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for sandbox in list(self._open.values()):
                with contextlib.suppress(TangramError):
                    sandbox.session.renew()


@contextlib.contextmanager
def _told_as_api_error() -> Iterator[None]:
    """Turns the errors of the job's client into errors of the REST routes."""
    try:
        yield
    except (InvalidInput, InfeasibleRequest) as error:
        raise ApiError(400, str(error)) from None
    except (BrokerUnreachable, ClientClosed) as error:
        raise ApiError(503, str(error), retry_after_s=1) from None
    except SessionLost as error:
        raise ApiError(404, str(error)) from None
    except TangramError as error:
        raise ApiError(500, str(error)) from None
