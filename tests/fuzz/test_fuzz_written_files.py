"""What a person writes, and files of one value: each reader gives a value, or its own error in one
line that names the file or the field. What was accepted is accepted again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.fuzz_inputs import SHORT, edited_text, scratch
from hypothesis import example, given
from hypothesis import strategies as st

from tangram_hpc.client.session_handle import read_handle
from tangram_hpc.config.allocations import alloc_policy, elastic
from tangram_hpc.config.endpoints import endpoint_spec
from tangram_hpc.config.planner.files import (
    EXAMPLES,
    read_hardware,
    read_history,
    read_measured,
    read_model,
)
from tangram_hpc.config.planner.plan_file import read_plan, write_plan
from tangram_hpc.config.planner.planner_settings import planner_settings
from tangram_hpc.config.rollouts import rollouts_spec
from tangram_hpc.config.services import service_spec
from tangram_hpc.config.settings import load_config
from tangram_hpc.errors import AccessError, InvalidInput
from tangram_hpc.http_api.keys import read_keys
from tangram_hpc.libra.simulation import rl_scenario
from tangram_hpc.simulator import workload
from tangram_hpc.simulator.elastic_runs import read_elastic_scenario
from tangram_hpc.storage.access import Access, read_access, write_access
from tangram_hpc.storage.folder_lock import holder_of, last_sign
from tangram_hpc.storage.identity import JobStart, read_starts, write_starts
from tangram_hpc.storage.secrets_file import SecretsFile

SETTINGS = """
placer = "elastic"
sync = "batch"
cpus = 4
mem_mib = 1024
read_paths = ["/opt"]
devices = "fake:2"
end = "+600"
[endpoints.judge]
concurrency = 8
rate = 2.5
burst = 4
[services.reward]
backend = "fake"
restore_s = 0.5
degrees = [1, 2]
token_s = 0.1
[services.model]
backend = "vllm"
url = "http://localhost:8000"
model = "m"
gpus = [0, 1]
node = "n1"
[elastic]
max_nodes = 4
max_core_hours = 10.0
[[elastic.satellites]]
name = "small"
partition = "p"
cpus = 16
time_min = 30
[rollouts.policy]
buckets = [{services = ["a"], upto = 4096, degree = 1}, {services = ["b"]}]
tree = "/tree"
[planner]
hardware = "a800-80g"
tp_share = 0.5
history = 64
"""
ELASTIC = SETTINGS[SETTINGS.index("[elastic]") : SETTINGS.index("[rollouts")] + """
[slurm]
wait_s = 5.0
nodes = 3
partitions = ["p"]
"""
RL = Path(rl_scenario.__file__).parent / "examples"
PLAN: dict[str, Any] = {
    "format": "tangram-plan/1", "model": "m", "hardware": "h", "gpus": 2, "gpus_per_node": 2,
    "expected_step_s": 1.0, "spare": 0, "costs": "model", "training": {
        "gpus": 1, "tp": 1, "ep": 1, "pp": 1, "dp": 1, "micro_batch": 1, "expected_s": 1.0,
        "modelled_s": 1.0, "mem_gib": 1.0, "blocks": [{"node": 0, "gpus": [0]}]},
    "rollout": [{"degree": 1, "requests": 4, "shortest": 1, "longest": 9, "expected_s": 1.0,
                 "modelled_s": 1.0, "block": {"node": 0, "gpus": [1]}}],
    "buckets": [{"degree": 1, "instances": 1, "up_to_tokens": 9}]}
REFUSED = object()


def read(reader: Callable[[Path], Any], name: str, content: bytes, named: str | None = None) -> Any:
    """What a reader makes of a file with this content; REFUSED for its own error, in one line that
    names the file, or what `named` says."""
    path = scratch() / name
    path.write_bytes(content)
    path.chmod(0o600)
    try:
        return reader(path)
    except (InvalidInput, AccessError) as error:
        said = str(error)
        assert said and "\n" not in said and len(said) < 2000, said
        assert (str(path) if named is None else named) in said, said
        return REFUSED


def settings_of(path: Path) -> tuple[Any, ...]:
    """The settings of a file, and all its tables checked, as a broker and a planner do it."""
    config = load_config({"HOME": str(scratch()), "TANGRAM_CONFIG": str(path)}, say=False)
    return (config, alloc_policy(elastic(config.elastic)), planner_settings(config.planner),
            [endpoint_spec(name, table) for name, table in config.endpoints.items()],
            [service_spec(name, table) for name, table in config.services.items()],
            [rollouts_spec(name, table) for name, table in config.rollouts.items()])


@SHORT
@example(b"a = " + b"[" * 3000)  # too deep for the reader of TOML
@example(b"a = " + b"1" * 5000)  # more digits than Python reads
@example('placer = "fcfs:²"'.encode())  # a digit that is no number
@given(edited_text([SETTINGS]))
def test_settings(content: bytes) -> None:
    found = read(settings_of, "tangram.toml", content, "")
    if found is not REFUSED:
        config = found[0]
        assert type(config)(**config.model_dump()) == config or "nan" in repr(config)


@SHORT
@given(edited_text([ELASTIC]))
def test_elastic_scenarios(content: bytes) -> None:
    read(read_elastic_scenario, "elastic.toml", content, "")


@SHORT
@given(edited_text([path.read_text() for path in sorted(RL.glob("*.toml"))]))
def test_rl_scenarios(content: bytes) -> None:
    read(rl_scenario.read_rl_scenario, "rl.toml", content, "")


@SHORT
@given(edited_text([path.read_text() for path in sorted(EXAMPLES.glob("model-*.toml"))]))
def test_model_files(content: bytes) -> None:
    found = read(lambda path: read_model(str(path)), "model.toml", content)
    if found is not REFUSED:
        assert found.shape().params > 0
        found.job(), found.engine()
        if found.lengths is not None:
            assert len(found.lengths.requests(5)) == 5


@SHORT
@given(edited_text([path.read_text() for path in sorted(EXAMPLES.glob("hardware-*.toml"))]))
def test_hardware_files(content: bytes) -> None:
    found = read(lambda path: read_hardware(str(path)), "hardware.toml", content)
    if found is not REFUSED:
        assert found.hardware().gpus_per_node >= 1


@SHORT
@example(b"[" * 3000)
@given(edited_text([
    '{"prompt": 512, "generated": 3000, "tool": 900, "tool_s": 4.5, "turns": 6}\n'
    '{"prompt": 0, "generated": 1}\n',
    '{"stage": "train", "modelled_s": 1.5, "measured_s": 2, "mean_tokens": 900.5}\n'
    '{"stage": "rollout", "degree": 2, "mixed": true, "modelled_s": 1, "measured_s": 2, '
    '"mean_tokens": 7}\n']))
def test_histories_and_measured_steps(content: bytes) -> None:
    read(read_history, "history.jsonl", content)
    read(read_measured, "measured.jsonl", content)


@SHORT
@given(edited_text([json.dumps(PLAN, indent=1)]))
def test_plan_files(content: bytes) -> None:
    found = read(read_plan, "plan.json", content)
    if found is not REFUSED:
        assert found.degrees()
        write_plan(scratch() / "plan.json", found)
        assert read_plan(scratch() / "plan.json") == found or "nan" in repr(found)


@SHORT
@example(b"[" * 3000)
@given(edited_text(["\n".join(
    workload.example(Path("mixed-24"), ".jsonl").read_text().splitlines()[:4])]))
def test_workload_files(content: bytes) -> None:
    found = read(workload.read_workload, "work.jsonl", content)
    if found is not REFUSED:
        for action in workload.all_actions(found):
            assert action.run_ns(action.degrees[-1]) >= 0


@SHORT
@given(edited_text([workload.example(Path(name), ".json").read_text()
                    for name in ("coding-200", "cluster-24")]))
def test_cluster_files(content: bytes) -> None:
    found = read(workload.read_cluster, "cluster.json", content)
    if found is not REFUSED:
        assert len(found.node_specs()) == sum(node.count for node in found.nodes)
        found.endpoint_specs()


def _access_text() -> str:
    path = scratch() / "seed"
    write_access(path, Access("j", ("unix:/s", "tcp:h:1"), b"\1" * 32, "/store", "h", 7, 30.0))
    return path.read_text()


@SHORT
@example(b"\xe9")  # not UTF-8
@example(b"[" * 3000)
@example(_access_text().replace('["unix:/s", "tcp:h:1"]', '"unix:/s"').encode())
@given(edited_text([_access_text(), _access_text().replace('"ended": ""', '"ended": "now"')]))
def test_access_files(content: bytes) -> None:
    found = read(read_access, "access.json", content)
    if found is not REFUSED:
        assert all(isinstance(text, str) for text in (found.job, found.store, *found.addresses))
        write_access(scratch() / "access.json", found)
        assert read_access(scratch() / "access.json") == found


@SHORT
@example(b"[" * 3000)
@example(b'{"format": "tangram-identity/1", "cluster": "c", "job": 7, "starts": [[1e999, 0]]}')
@given(edited_text(['{"format": "tangram-identity/1", "cluster": "c", "job": "7", '
                    '"starts": [[1700000000, 0], [1700000100, 1]]}']))
def test_identity_files(content: bytes) -> None:
    (scratch() / "identity.json").write_bytes(content)
    found = read_starts(scratch())  # one that cannot be read counts as no record
    if found:
        write_starts(scratch(), found)
        assert read_starts(scratch()) == found
    assert all(isinstance(start, JobStart) for start in found)


@SHORT
@example(b"[" * 3000)
@given(edited_text(['{"format": "tangram-secrets/1", "secrets": {"a": "one", "b": "two"}}']))
def test_secrets_files(content: bytes) -> None:
    file = SecretsFile(scratch())
    if read(lambda path: file.keep({"c": "three"}), "secrets.json", content) is not REFUSED:
        assert file.values(["c"]) == {"c": "three"}


@SHORT
@given(edited_text(["# who\nann 0123456789abcdef\nbob  fedcba9876543210 # his\n"]))
def test_key_files(content: bytes) -> None:
    found = read(read_keys, "keys", content)
    assert found is REFUSED or all(len(key) >= 16 for key in found.values())




@SHORT
@example(b"[" * 3000, False)
@example(b'{"host": "h", "pid": 1e999, "since": "", "restarts": 0}', False)
@given(edited_text(['{"host": "h", "pid": 7, "since": "now", "restarts": 0}']), st.booleans())
def test_epoch_files(content: bytes, odd: bool) -> None:
    folder = scratch() / "epochs"
    folder.mkdir(exist_ok=True)
    (folder / ("epoch-²" if odd else "epoch-3")).write_bytes(content)
    holder_of(folder)
    assert last_sign(folder) >= 0


@SHORT
@example(b"[" * 3000)
@given(edited_text(['{"name": "s", "token": "abcdef", "job": "7"}']))
def test_session_handles(content: bytes) -> None:
    text = content.decode(errors="surrogateescape")
    found = read(lambda _: read_handle(text, "", ""), "handle", b"", "")
    if found is not REFUSED:
        assert read_handle(found.text, "", "") == found
