"""Harbor's environment over a stood-in base class: the behaviours of every adapter, and how a task
becomes a session. Harbor itself is in `test_harbor_environment.py`, in the long suite."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.adapter_behaviours import (
    LIMIT_S,
    AdapterBehaviours,
    adapters_cluster,
    eventually,
    sessions_open,
)
from helpers.harness_stand_ins import TaskEnvironment, harbor_stood_in
from helpers.hostile_rig import reason_to_skip
from helpers.root_folder_rig import PROGRAMS, make_image

from tangram_hpc import LocalCluster, Session
from tangram_hpc.errors import ActionFailed, FileMissing, InvalidInput, TangramError
from tangram_hpc.hooks.harness.dockerfile_replay import replay_dockerfile

__all__ = ["adapters_cluster"]


@pytest.fixture(scope="module", autouse=True)
def module() -> Iterator[Any]:
    with harbor_stood_in() as imported:
        yield imported


@pytest.fixture(scope="module", name="image")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    if why := reason_to_skip("bwrap"):
        pytest.skip(why)
    return str(make_image(tmp_path_factory.mktemp("image") / "root", (*PROGRAMS, "bash")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "environment").mkdir()
    return tmp_path / "environment"


def do(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def make(module: Any, folder: Path, task: TaskEnvironment, **more: Any) -> Any:
    return module.TangramEnvironment(folder, "task", "task__1__env", None, task, **more)


class TestHarborWithItsBaseClassStoodIn(AdapterBehaviours):
    @pytest.fixture(autouse=True)
    def _task(self, module: Any, image: str, folder: Path) -> None:
        self.module, self.folder, self.task = module, folder, TaskEnvironment(image, "/testbed")

    def begin(self, **options: Any) -> Any:
        environment = make(self.module, self.folder, self.task, network=False, **options)
        try:
            do(environment.start(False))
        except TangramError as error:  # Harbor notes it as the trial's exception
            return error
        return environment

    def call(self, trajectory: Any, line: str) -> str:
        if isinstance(trajectory, TangramError):
            return str(trajectory)
        try:
            told = do(trajectory.exec(line, timeout_sec=LIMIT_S))
        except (TangramError, RuntimeError) as error:
            return str(error)
        return str(told.stdout + told.stderr + (str(told.return_code) if told.return_code else ""))

    def end(self, trajectory: Any) -> None:
        if not isinstance(trajectory, TangramError):
            do(trajectory.stop(True))

    def lose(self, trajectory: Any) -> None:
        trajectory._session.close()


def test_a_tasks_folders_variables_and_user_hold_for_its_commands(
        cluster: LocalCluster, module: Any, image: str, folder: Path, tmp_path: Path) -> None:
    task = TaskEnvironment(image, "/new/place", memory_mb=128, storage_mb=64)
    environment = make(module, folder, task, network=False, persistent_env={"A": "1", "B": "1"})

    async def story() -> None:
        await environment.start(False)
        told = await environment.exec("pwd; echo $A $B; ls -d /logs/verifier", env={"B": "2"})
        assert told.stdout == "/new/place\n1 2\n/logs/verifier\n"
        assert (await environment.exec("echo $USER", user="pg", cwd="sub/..")).return_code == 126
        assert (await environment.exec("echo $USER", user="pg")).stdout == "pg\n"
        (tmp_path / "tree/deep").mkdir(parents=True)
        (tmp_path / "tree/deep/file").write_text("text")
        await environment.upload_dir(tmp_path / "tree", "/solution")
        await environment.upload_file(tmp_path / "tree/deep/file", "beside")
        assert (await environment.exec("cat /solution/deep/file beside")).stdout == "texttext"
        await environment.exec("ln -s /etc/passwd /solution/link")
        await environment.download_dir("/solution", tmp_path / "back")
        assert [path.name for path in sorted((tmp_path / "back").rglob("*"))] == ["deep", "file"]
        with pytest.raises(FileNotFoundError):
            await environment.download_file("/none", tmp_path / "none")
        spec = environment._session.spec
        assert (spec.mem_mib, spec.disk_mib, spec.network) == (128, 64, False)
        await environment.stop(True)
        with pytest.raises(RuntimeError, match="not started"):
            await environment.exec("true")

    do(story())


def test_a_commands_time_limit_is_not_taken_for_that_of_the_agent(
        cluster: LocalCluster, module: Any, image: str, folder: Path) -> None:
    """Harbor awaits the agent's whole work with a time limit, and takes each TimeoutError that
    comes out of it for the end of that limit: a trial that is not repeated."""
    environment = make(module, folder, TaskEnvironment(image), network=False)

    async def story() -> None:
        await environment.start(False)
        with pytest.raises(RuntimeError, match="Command timed out after 1 seconds"):
            await asyncio.wait_for(environment.exec("sleep 60", timeout_sec=1), timeout=60)
        await environment.stop(True)

    do(story())


def test_a_dockerfiles_steps_are_done_in_the_session(
        cluster: LocalCluster, module: Any, image: str, folder: Path) -> None:
    (folder / "Dockerfile").write_text(
        f"FROM {image}\nENV GREETING='hello there'\nWORKDIR /work\nCOPY --chmod=755 *.sh bin/\n"
        "COPY --chown=7 . /all\nRUN bin/one.sh $GREETING > said\nUSER pg\n")
    (folder / "one.sh").write_text("#!/bin/sh\necho $# $1\n")
    environment = make(module, folder, TaskEnvironment(), network=False)

    async def story() -> None:
        await environment.start(False)
        told = await environment.exec("pwd; cat said; echo $GREETING $USER; ls /all")
        assert told.stdout == "/work\n2 hello\nhello there pg\nDockerfile\none.sh\n"
        await environment.stop(True)

    do(story())


class RecordingSession:
    """Stands for a session in which each call succeeds; keeps what it was told to do."""

    def __init__(self) -> None:
        self.argvs: list[list[str]] = []
        self.files: dict[str, int] = {}

    async def exec(self, argv: list[str], **options: Any) -> Any:
        self.argvs.append(list(argv))
        return SimpleNamespace(text="/testbed\n")

    async def stat(self, path: str) -> Any:
        raise FileMissing(path)

    async def mkdir(self, path: str) -> None:
        self.files[path] = 0

    async def write(self, path: str, data: bytes, mode: int) -> None:
        self.files[path] = mode

    def upload(self, source: Path, target: str) -> None:
        self.files[target] = 1


def replayed(folder: Path, line: str) -> RecordingSession:
    (folder / "Dockerfile").write_text(f"FROM x\n{line}\n")
    session = RecordingSession()
    do(replay_dockerfile(cast("Session", session), folder / "Dockerfile"))
    return session


@pytest.mark.parametrize("line", [
    "COPY link /x", "COPY --chmod=644 link /x", "COPY --chmod=644 sub /x", "COPY sub /x",
    "COPY folder /x", "COPY folder/secret /x", "COPY sub/*k /x", "ADD more /x"])
def test_a_link_out_of_the_build_context_is_never_followed(
        folder: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/secret").write_text("not of the task")
    (folder / "sub").mkdir()
    (folder / "more").mkdir()
    for name in ("link", "sub/link"):
        (folder / name).symlink_to(tmp_path / "out/secret")
    (folder / "folder").symlink_to(tmp_path / "out")
    (folder / "more/nothing").symlink_to("missing")
    with pytest.raises(InvalidInput, match=r"^Dockerfile line 2: .* of the build context;.*$"):
        replayed(folder, line)


def test_a_link_within_the_build_context_is_followed(folder: Path) -> None:
    (folder / "file").write_text("text")
    (folder / "link").symlink_to("file")
    assert replayed(folder, "COPY --chmod=640 link /x").files == {"/x": 0o640}


def test_copied_files_belong_to_the_owner_that_chown_names(folder: Path) -> None:
    (folder / "sub/deep").mkdir(parents=True)
    (folder / "sub/deep/file").write_text("text")
    for chmod in ("", "--chmod=600 "):
        session = replayed(folder, f"COPY --chown=me:us {chmod}sub there")
        assert session.argvs[-1] == ["chown", "-h", "me:us", "--", "/testbed/there",
                                     "/testbed/there/deep", "/testbed/there/deep/file"]
    assert session.files == {"/testbed/there/deep": 0, "/testbed/there/deep/file": 0o600}


def test_a_dockerfile_whose_command_fails_ends_the_start_with_its_line(
        cluster: LocalCluster, module: Any, image: str, folder: Path) -> None:
    (folder / "Dockerfile").write_text(f"FROM {image}\nRUN echo broken >&2; exit 3\n")
    with pytest.raises(ActionFailed, match=r"line 2: the command ended with 3.*broken"):
        do(make(module, folder, TaskEnvironment(), network=False).start(False))
    assert eventually(lambda: sessions_open(cluster) == 0)


@pytest.mark.parametrize("forced", [False, True])
def test_a_forced_build_goes_before_the_tasks_image(
        cluster: LocalCluster, module: Any, image: str, folder: Path, forced: bool) -> None:
    (folder / "Dockerfile").write_text(f"FROM {image}\nWORKDIR /place\nRUN echo 1 >built\n")
    environment = make(module, folder, TaskEnvironment(image), network=False)

    async def story() -> None:
        await environment.start(forced)
        told = await environment.exec("pwd; ls")
        assert told.stdout == "/place\n" + ("built\n" if forced else "")
        await environment.stop(True)

    do(story())


def test_a_task_that_names_no_directory_leaves_the_session_its_own(
        cluster: LocalCluster, module: Any, image: str, folder: Path) -> None:
    environment = make(module, folder, TaskEnvironment(image), network=False)

    async def story() -> None:
        await environment.start(False)
        theirs = (await environment._session.exec("pwd")).text
        assert (await environment.exec("pwd")).stdout == theirs != "/\n"
        await environment.stop(True)

    do(story())


def test_a_task_without_an_image_and_a_second_stage_are_refused(
        module: Any, folder: Path) -> None:
    with pytest.raises(InvalidInput, match="docker-compose"):
        make(module, folder, TaskEnvironment())
    (folder / "Dockerfile").write_text("FROM a AS one\nFROM b\nCOPY --from=one /x /x\n")
    with pytest.raises(InvalidInput, match=r"line 2.*second stage"):
        make(module, folder, TaskEnvironment())


@pytest.mark.parametrize(("mode", "given", "cpus"), [
    ("auto", None, (1, 4)), ("limit", None, (1, 4)), ("guarantee", None, 4), ("auto", 2, (1, 2))],
    ids=["auto", "limit", "guarantee", "option"])
def test_a_tasks_cores_are_a_limit_or_what_a_command_waits_for(
        module: Any, folder: Path, mode: str, given: int | None, cpus: Any) -> None:
    environment = make(module, folder, TaskEnvironment("image", cpus=4), cpus=given)
    environment._cpu_resource_mode = SimpleNamespace(value=mode)
    assert environment._cpus == cpus


@pytest.mark.parametrize(("mode", "option", "network"), [
    ("public", None, True), ("public", False, False), ("public", "false", False),
    ("public", "off", "off"), ("public", "loopback", "loopback"), ("public", "True", True),
    ("public", "open", "open"), ("public", ["www.example.org"], ["www.example.org"]),
    ("no-network", None, False), ("no-network", True, False), ("no-network", "open", False),
    ("no-network", ["www.example.org"], False)])
def test_an_option_takes_the_network_away_and_never_gives_what_the_task_forbids(
        module: Any, folder: Path, mode: str, option: Any, network: Any) -> None:
    environment = make(module, folder, TaskEnvironment("image"), network=option)
    environment._network_policy = SimpleNamespace(network_mode=SimpleNamespace(value=mode))
    assert environment._network == network and type(environment._network) is type(network)


@pytest.mark.parametrize("option", ["none", "www.example.org", 0, {"allow": "www.example.org"}])
def test_a_network_that_cannot_be_understood_is_refused_in_one_line(
        module: Any, folder: Path, option: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^network: .* off, loopback, open and host.*$"):
        make(module, folder, TaskEnvironment("image"), network=option)


def test_a_mode_of_the_network_that_is_not_known_gives_none(module: Any, folder: Path) -> None:
    environment = make(module, folder, TaskEnvironment("image"))
    environment._network_policy = SimpleNamespace(network_mode=SimpleNamespace(value="allowlist"))
    with pytest.raises(InvalidInput, match="network_mode: 'allowlist' cannot be served"):
        environment._network  # noqa: B018 - the property refuses


def test_capabilities_are_told_to_new_and_to_old_revisions(module: Any, folder: Path) -> None:
    environment = make(module, folder, TaskEnvironment("image"))
    told = environment.capabilities
    assert (told.disable_internet, told.gpus, told.mounted) == (True, False, False)
    assert type(environment).resource_capabilities().cpu_limit
    with harbor_stood_in(with_capabilities=False) as older:
        old = make(older, folder, TaskEnvironment("image"))
        assert (old.can_disable_internet, old.supports_gpus, old.is_mounted) == (True, False, False)


def test_the_preflight_says_where_no_broker_is(
        module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tangram_hpc.hooks.process_client import use_client

    use_client(None)
    monkeypatch.setenv("TANGRAM_ACCESS", str(tmp_path / "none.json"))
    for given in ({}, {"kwargs": {"network": False}}):  # the latter as Harbor 0.26 calls it
        with pytest.raises(SystemExit, match=r"none\.json"):
            module.TangramEnvironment.preflight(**given)
