"""However many names actions have, memory and the cost of a decision stay bounded."""

from __future__ import annotations

import random
import sys
import tracemalloc

import pytest
from helpers.builders import World

from tangram_hpc.client.request import exec_call
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.ids import mint
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
from tangram_hpc.scheduler.scheduler import Scheduler
from tangram_hpc.scheduler.state.estimator import Estimator

MS = 1_000_000


def learn(estimator: Estimator, name: str, ns: int, times: int = 1,
          degrees: tuple[int, ...] = (1,)) -> Action:
    """Tells the estimator of actions of one name that ran `ns` on one unit."""
    action = Action(1, name, degrees=degrees)
    for _ in range(times):
        estimator.began(action)
        estimator.ended(action, [(1, ns)], True)
    return action


def plain_name(n: int) -> str:
    """A name without digits, a different one for each number."""
    return "".join(chr(ord("a") + n // 26 ** k % 26) for k in range(5))


@pytest.mark.parametrize("name", [plain_name, "run_{}.py".format], ids=["words", "numbers"])
def test_the_estimator_uses_bounded_memory_for_thousands_of_names(name) -> None:
    estimator = Estimator()
    tracemalloc.start()
    try:
        for n in range(4000):
            learn(estimator, name(n), (1 + n % 50) * MS)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 8 << 20  # a class took 49 KiB for ever


def calls_for_decisions(placer: str, names: int, waiting: int = 6000) -> float:
    """Python calls of `plan` and `handle` per grant, on a queue with this many names."""
    w = Scheduler(make_placer(placer))
    w.handle(ev.ClientJoined(0, 1, "uid", "test", 0, 1, "socket"))
    world = World(placer)
    world.scheduler = w
    world.happen = lambda fact: [w.handle(each) for each in w.consequences(fact)]  # no checks
    world.node(cpus=16)
    rng, now = random.Random(1), 1
    for n in range(names):  # some of each class have ended, so that it is known
        learn(w.ledger.estimator, plain_name(n), rng.randrange(1, 400) * MS)
    for n in range(waiting):
        w.handle(ev.ActionSubmitted(now, Action(
            mint(1, n + 1), plain_name(n % names), attempts_max=1)))
    made, grants = 0, 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal made
        made += event == "call"

    for turn in range(25):
        now += 30 * MS
        for lease in list(w.ledger.leases)[:4] if turn else ():
            w.handle(ev.LeaseFinished(now, lease, Outcome(ActionState.COMPLETED, exec_ns=MS), True))
        sys.setprofile(count)
        try:
            while events := w.plan(now):
                for event in events:
                    w.handle(event)
                    grants += isinstance(event, ev.LeaseGranted)
        finally:
            sys.setprofile(None)
    assert grants >= 20
    return made / grants


@pytest.mark.parametrize("placer", ["elastic", "paper", "first-fit", "fcfs:2"])
def test_a_decision_costs_no_more_with_thousands_of_names(placer: str) -> None:
    few, many = (calls_for_decisions(placer, names) for names in (20, 6000))
    assert many <= 1.5 * few, (few, many)


def test_many_names_that_differ_in_digits_merge_into_one_class() -> None:
    estimator = Estimator()
    for n in range(40):
        learn(estimator, f"run_{n}.py", 10 * MS, 25)
        learn(estimator, "other", 10_000 * MS, 25)
    new = Action(1, "run_4711.py")
    assert estimator.seen(new)
    assert estimator.estimate(new)[1] < 100 * MS < estimator.estimate(Action(2, "new"))[1]


def test_few_names_that_differ_in_digits_stay_separate_classes() -> None:
    estimator = Estimator()
    short, long = learn(estimator, "judge-7b", MS, 50), learn(estimator, "judge-70b", 900 * MS, 50)
    assert estimator.estimate(short)[1] * 5 < estimator.estimate(long)[1]


def test_a_forgotten_class_is_estimated_as_its_parent_and_a_used_class_is_kept() -> None:
    estimator = Estimator()
    kept, forgotten = learn(estimator, "kept", MS, 50), learn(estimator, "gone", MS, 50)
    for n in range(3000):
        learn(estimator, plain_name(n), 1000 * MS)
        learn(estimator, "kept", MS)
    assert not estimator.seen(forgotten) and estimator.seen(kept)
    assert estimator.estimate(forgotten) == estimator.estimate(Action(9, "unheard-of"))
    assert estimator.estimate(kept)[1] < 100 * MS


def test_a_class_with_a_running_action_is_never_forgotten() -> None:
    estimator = Estimator()
    running = learn(estimator, "running", MS, 50)
    estimator.began(running)
    for n in range(3000):
        learn(estimator, plain_name(n), 1000 * MS)
    assert estimator.seen(running)
    estimator.ended(running, [(1, MS)], True)


def test_what_is_learned_does_not_depend_on_what_was_asked() -> None:
    """A mean is remembered by the bucket of the work that was done already, and planning may have
    asked with another amount of the same bucket. A replay does not plan."""
    asked, silent = Estimator(), Estimator()
    action = Action(1, "x", degrees=(1, 2, 4))
    for estimator in (asked, silent):
        for _ in range(3):
            estimator.began(action)
            estimator.ended(action, [(1, 1_000_000_000)], True)
        estimator.began(action)
    asked.mean(action.key, action.name, action.degrees, 4_900_000_000)
    for estimator in (asked, silent):
        estimator.ended(action, [(1, 5_000_000_000)], False)
    assert asked.mean(action.key, action.name, (1, 2)) == silent.mean(
        action.key, action.name, (1, 2))


def test_a_replay_with_more_names_than_are_kept_gives_the_same_estimates() -> None:
    w = World("first-fit")
    w.node(cpus=4)
    rng = random.Random(5)
    for n in range(2500):
        w.now += 1
        name = plain_name(n) if n % 2 else f"run_{n}"
        action = Action(w.id(), name, attempts_max=1)
        for fact in (ev.ActionSubmitted(w.now, action),):
            w.events.append(fact)
            w.scheduler.handle(fact)
        for event in w.scheduler.plan(w.now):
            w.events.append(event)
            w.scheduler.handle(event)
        if rng.random() < 0.9 and w.ledger.leases:
            w.now += rng.randrange(1, 9) * MS
            fact = ev.LeaseFinished(w.now, next(iter(w.ledger.leases)), Outcome(
                ActionState.COMPLETED, exec_ns=rng.randrange(1, 9) * MS), True)
            w.events.append(fact)
            w.scheduler.handle(fact)
    again = Scheduler(make_placer("first-fit"))
    for event in w.events:
        again.handle(event)
    asked = [Action(1, name) for name in ("run_9", plain_name(2499), plain_name(7), "x")]
    assert [again.ledger.estimator.estimate(a) for a in asked] == [
        w.ledger.estimator.estimate(a) for a in asked]
    again.ledger.check()


@pytest.mark.parametrize(("command", "name"), [
    ("cd repo && SEED=17 timeout 60 python3 -m pytest -q", "pytest"),
    ("SEED=17 ./train", "train"), ("cd /tmp", "cd"), ("A=1", "sh"), ("ls -l", "ls"),
    ("python3 tests/run_17.py --fast", "run_N.py"), ("./test_12 --all", "test_N"),
    ("/usr/bin/bzip2 file", "bzip2"), ("gcc-12 -o a a.c", "gcc-12"),
    ("bash -lc 'cd /x; env A=1 make -j4'", "make"), ("bash scripts/eval_3.sh", "eval_N.sh"),
    ("sudo -u bob nice -n 5 time exec git status", "git"), ("timeout -k 5 10 cargo test", "cargo"),
    ("export A=1; set -e; npm test", "npm"), ("(cd a && go test ./...) 2>&1 | tee log", "go"),
    ("python3 -c 'print(1)'", "python"), ("python3 - <<EOF\nprint(1)\nEOF", "python"),
    ("[ -d build ] && cmake ..", "cmake"), ("for i in 1 2; do pytest $i; done", "pytest"),
    ("if [ -f x ]; then make; fi", "make"), ("2>/dev/null ls", "ls"), ("echo 'unclosed", "echo"),
    ("uv run pytest", "pytest"), ("timeout 5", "timeout"),
    ("i=0; while [ $i -lt 3 ]; do i=$((i+1)); sleep 1; done", "sleep"),
    ("for ((i=0; i<3; i++)); do ((j++)); make; done", "make"), ("A=$(( 6 * 7 )) ./train", "train"),
    ("cd $(git rev-parse --show-toplevel) && pytest", "pytest"), ("x=$(ls -l | wc -l)", "ls"),
    ("for i in $(seq 9); do pytest $i; done", "pytest"),
    ("export A=$(date +%s); make", "make"), ("[ $(ls | wc -l) -gt 3 ] && make", "make"),
    ("echo $(pytest -q)", "echo"), ("cd $HOME/$x && a=$b make", "make"), ("$CC -o a a.c", "$CC"),
    ("# all of it\nmake all", "make"), ("&&", "sh"), ("bash", "bash"),
    (["/bin/true"], "true"), (["env", "A=1", "python3", "-m", "http.server"], "http"),
    (["bash", "-c", "cd x && pytest"], "pytest"), (["A=1"], "A=1"), ([""], ""),
    (["sh", "-c", 'exec "$@" 2>&1', "sh", "bash", "-lc", "cd x && pytest"], "pytest"),
    (["sh", "-c", 'exec "$@"', "sh"], "sh"),
])
def test_the_class_of_a_command_is_the_program_that_it_runs(
        command: str | list[str], name: str) -> None:
    assert exec_call(command)[1] == name


@pytest.mark.parametrize("seed", range(3))
def test_every_command_line_gets_a_class_name(seed: int) -> None:
    rng = random.Random(seed)
    parts = ["'", '"', "\\", "$(", ")", "bash -c ", "env ", "A=", "&&", ";", "\n", "<<", ">",
             "2>&1", "python -m", " ", "x", "7", "timeout 5 ", "\u00e9", "-", "--", "{", "}",
             "then"]
    for _ in range(1500):
        line = "x" + "".join(rng.choice(parts) for _ in range(rng.randrange(60)))
        assert exec_call(line)[1]
    assert exec_call("x " + "\\'\"(" * 100_000)[1]
