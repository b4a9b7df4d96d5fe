"""The services of a node: batches, which copy is on which block, and that no call is lost whatever
process dies."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from helpers.service_rig import REFUSED, Rig, play

from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import FALTERED
from tangram_hpc.domain.states import ActionState
from tangram_hpc.ports import OutOfDeviceMemory, ServiceDied
from tangram_hpc.services.processes import node_copies

DONE, FAILED = ActionState.COMPLETED, ActionState.FAILED


def test_concurrent_calls_run_as_one_batch_with_separate_answers() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        leases = [rig.call("a", n) for n in range(6)]
        await rig.all(*leases)
        assert [rig.values[x] for x in leases] == [{"fake": n} for n in range(6)]
        assert [e[3] for e in rig.of("call")] == [[0, 1, 2, 3], [4, 5]]
        assert [rig.ends[x].batch for x in leases] == [4] * 4 + [2] * 2
        restores = [rig.ends[x].restore_ns for x in leases]
        assert restores[0] > 0 and restores[1:] == [0] * 5
        assert len(rig.of("wake")) == 1 and not rig.of("park")
    play(scene)


def test_a_call_tells_how_long_it_waited_for_its_batch_apart_from_the_restore() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch=8, batch_wait_ms=80)
        rig.declare("b", batch=1)
        early = rig.call("a")
        await rig.all(early, rig.call("b", gpus=(1,)))
        assert rig.ends[early].setup_ns >= 80 * 10**6 and rig.ends[early].restore_ns > 0
        first, second = rig.call("b", gpus=(1,)), rig.call("b", gpus=(1,))
        await rig.all(first, second)
        assert rig.ends[second].setup_ns < rig.ends[first].exec_ns  # the wait for `first` is none
    play(scene, call_s=0.5)


def test_the_restore_is_in_the_parts_of_every_call_of_the_batch_that_waited_for_it() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        first, second = rig.call("a"), rig.call("a")
        await rig.all(first, second)
        ends = [rig.ends[lease] for lease in (first, second)]
        assert [end.batch for end in ends] == [2, 2]
        assert ends[0].restore_ns >= 300 * 10**6 and ends[1].restore_ns == 0
        assert ends[0].setup_ns < ends[0].restore_ns <= ends[1].setup_ns
    play(scene, move_s=0.3)


@pytest.mark.parametrize("dies", ["wake", "call"])
def test_the_set_up_of_a_retry_is_that_of_its_last_try(dies: str) -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.trouble["load", "a"] = ServiceDied("once")
        if dies == "wake":
            rig.trouble["wake", "a"] = ServiceDied("twice")
        call = rig.call("a")
        killer = rig.call("a", method="die") if dies == "call" else call
        await rig.all(call, killer)
        assert rig.ends[call].state is DONE
        lost_ns = 10**9 * (rig.move_s if dies == "wake" else rig.call_s)
        assert 0 <= rig.ends[call].setup_ns < lost_ns
    play(scene, move_s=0.5, call_s=0.5)


def test_a_batch_keeps_its_token_budget_and_batch_1_runs_calls_singly() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch_tokens=10)
        rig.declare("b", batch=1)
        leases = [rig.call("a", n, tokens=t) for n, t in enumerate((4, 4, 4, 100, 1))]
        leases += [rig.call("b", n, gpus=(1,)) for n in range(2)]
        await rig.all(*leases)
        batches = [e[3] for e in rig.of("call") if e[0] == "a"]
        assert batches == [[0, 1], [2], [3], [4]]
        assert [e[3] for e in rig.of("call") if e[0] == "b"] == [[0], [1]]
    play(scene)


def test_a_parked_service_returns_to_its_block_without_loading_again() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.declare("b")
        for service in "abab":
            await rig.all(rig.call(service))
        assert [(e[0], e[2]) for e in rig.log if e[2] in ("wake", "park")] == [
            ("a", "wake"), ("a", "park"), ("b", "wake"), ("b", "park"), ("a", "wake"),
            ("a", "park"), ("b", "wake")]
        assert len(rig.of("load")) == 2
    play(scene)


def moves(rig: Rig) -> list[tuple[object, object]]:
    """Which services were woken and parked, in order."""
    return [(e[0], e[2]) for e in rig.log if e[2] in ("wake", "park")]


def test_weights_stay_on_the_gpu_until_their_room_is_needed() -> None:
    async def scene(rig: Rig) -> None:
        for service in "abcd":
            rig.declare(service)
        for service in "abcbac":
            await rig.all(rig.call(service))
        assert moves(rig) == [("a", "wake"), ("b", "wake"), ("c", "wake")]
        restores = [rig.ends[lease].restore_ns for lease in (1, 2, 3, 4, 5, 6)]
        assert all(restores)  # the scheduler learns how short they are
        await rig.all(rig.call("d"))  # `b` was used longest ago
        assert moves(rig)[3:] == [("b", "park"), ("d", "wake")]
        await rig.all(rig.call("a"), rig.call("b", gpus=(1,)))
        assert moves(rig)[5:] == [("b", "wake")]  # a GPU of its own
    play(scene, cache_mib=3)


def test_a_copy_that_died_while_its_weights_were_kept_is_replaced_and_no_call_is_blamed() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.declare("b")
        await rig.all(rig.call("a"))
        await rig.all(rig.call("b"))
        rig.trouble["stand_by", "a"] = ServiceDied("it was killed")
        calls = [rig.call("a", n) for n in range(3)]
        await rig.all(*calls)
        assert all(rig.ends[call].state is DONE for call in calls)
        assert len(rig.of("call")) == 3 and len(rig.of("load")) == 3
    play(scene, cache_mib=9)


def test_an_engine_gets_the_whole_memory_of_its_gpu() -> None:
    async def scene(rig: Rig) -> None:
        for service in ("a", "b", "engine"):
            rig.declare(service)
        for service in ("a", "b", "engine", "a"):
            await rig.all(rig.call(service))
        assert moves(rig) == [("a", "wake"), ("b", "wake"), ("a", "park"), ("b", "park"),
                              ("engine", "wake"), ("engine", "park"), ("a", "wake")]
    play(scene, cache_mib=9)


def test_a_copy_that_is_kept_on_one_gpu_can_serve_another() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.declare("b")
        await rig.all(rig.call("a"))
        await rig.all(rig.call("b"))
        await rig.all(rig.call("a", gpus=(1,)))
        assert moves(rig) == [("a", "wake"), ("b", "wake"), ("a", "park"), ("a", "wake")]
        assert [e[3] for e in rig.of("wake")] == [(0,), (0,), (1,)]
    play(scene, cache_mib=3, mem_mib=2)


def test_kept_weights_go_when_the_gpu_has_less_room_than_the_setting_says() -> None:
    async def scene(rig: Rig) -> None:
        for service in "abc":
            rig.declare(service)
        for service in "abc":
            await rig.all(rig.call(service))
        assert moves(rig) == [("a", "wake"), ("b", "wake"), ("a", "park"), ("b", "park"),
                              ("c", "wake")]
        await rig.all(rig.call("b"))
        alone = rig.call("b", method="alone")  # a batch that needs the memory of `c`
        await rig.all(alone)
        assert rig.ends[alone].state is DONE and moves(rig)[5:] == [("b", "wake"), ("c", "park")]
    play(scene, cache_mib=9, device_mib=2)


def test_the_gpus_of_other_actions_are_vacated() -> None:
    async def scene(rig: Rig) -> None:
        for service in "abc":
            rig.declare(service)
        for service, gpu in (("a", 0), ("b", 0), ("c", 1)):
            await rig.all(rig.call(service, gpus=(gpu,)))
        assert rig.executor.occupies((0,)) and not rig.executor.occupies((2,))
        await rig.executor.vacate((0,))
        assert sorted(moves(rig)[3:]) == [("a", "park"), ("b", "park")]
        assert not rig.executor.occupies((0,)) and rig.executor.occupies((0, 1))
        await rig.all(rig.call("b"))
        assert moves(rig)[5:] == [("b", "wake")]
    play(scene, cache_mib=9)


def test_a_call_on_a_larger_block_parks_all_overlapping_copies() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", degrees=(1,))
        rig.declare("big", degrees=(2,))
        rig.may_end.clear()  # else the first copy may be free before the second block asks for one
        both = rig.call("a", gpus=(0,)), rig.call("a", gpus=(1,))
        while len(rig.of("call")) < 2:
            await asyncio.sleep(0.001)
        rig.may_end.set()
        await rig.all(*both)
        assert len(rig.of("load")) == 3  # each service, and the copy for the second block
        await rig.all(rig.call("big", gpus=(0, 1)))
        assert len(rig.of("park")) == 2
        await rig.all(rig.call("a", gpus=(1,)))
        assert rig.of("wake")[-1][3] == (1,) and len(rig.of("load")) == 3
    play(scene)


def test_a_resident_copy_serves_while_another_copy_is_loading() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch=1)
        rig.call_s, rig.load_s = 0.05, 3600.0
        first, second = rig.call("a"), rig.call("a", gpus=(1,))
        await rig.all(first, second)
        assert rig.copies[1].state == "new", "the second copy is still loading"
        assert rig.of("wake")[-1][1:] == (1, "wake", (1,))  # the first copy moved
        waited, restored = rig.ends[first].exec_ns, rig.ends[second].restore_ns
        assert 0 < restored < waited, "waiting for a copy is no restore"
    play(scene)


def test_a_copy_that_is_never_idle_still_moves_to_serve_other_blocks() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch=1)
        rig.call_s, rig.load_s = 0.002, 3600.0
        fed = [rig.call("a", n) for n in range(50)]
        other = rig.call("a", gpus=(1,))
        await rig.all(other)
        assert fed[-1] not in rig.ends
        await rig.all(*fed)
        assert [e[3] for e in rig.of("call") if e[3] != [0]] == [[n] for n in range(1, 50)]
    play(scene)


def test_two_loaded_copies_serve_at_the_same_time() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch=1)
        await rig.all(rig.call("a"), rig.call("a", gpus=(1,)))
        while rig.copies[-1].state == "new":
            await rig_turn()
        await rig.all(rig.call("a"), rig.call("a", gpus=(1,)))
        before = len(rig.of("wake"))
        rig.call_s = 0.02
        leases = [rig.call("a", method="hang", timeout_s=0.05), rig.call("a", 5, gpus=(1,))]
        await rig.all(leases[1])
        assert leases[0] not in rig.ends and len(rig.of("wake")) <= before + 1
        await rig.all(*leases)
        assert len(rig.copies) == 2
    play(scene)


def test_declared_copies_are_preloaded_round_robin_as_memory_allows() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", copies=3)
        rig.declare("b", copies=3)
        while len(rig.copies) < 5 or rig.copies[-1].state == "new":
            await rig_turn()
        await rig.all(rig.call("a"))
        assert [c.spec.name for c in rig.copies][:4] == ["a", "b", "a", "b"]
        assert len(rig.copies) == 5
    play(scene, mem_mib=5)


def test_servers_that_do_not_answer_hold_up_no_loading_of_other_services() -> None:
    async def scene(rig: Rig) -> None:
        rig.never_load = {"engine-1", "engine-2", "engine-3", "b"}
        for service in ("engine-1", "engine-2", "engine-3", "a", "b", "c"):
            rig.declare(service)
        await rig.all(rig.call("a"), rig.call("c"))
        rig.call("engine-1")  # it ends with the worker
    play(scene)


def test_no_more_copies_are_loaded_than_there_is_memory_for() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.declare("b")
        for _ in range(3):
            await rig.all(*(rig.call(name, gpus=(gpu,)) for name in "ab" for gpu in (0, 1)))
        assert len(rig.copies) == 2 and rig.of("wake")
    play(scene, mem_mib=2)


def test_the_first_copy_serves_all_blocks_when_a_second_cannot_be_loaded() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        await rig.all(rig.call("a"))
        rig.trouble["load", "a"] = REFUSED
        leases = [rig.call("a", n, gpus=(n % 2,)) for n in range(8)]
        await rig.all(*leases)
        assert [rig.values[x] for x in leases] == [{"fake": n} for n in range(8)]
        assert len(rig.copies) == 2
    play(scene)


def test_calls_of_a_batch_that_killed_its_copy_rerun_and_only_the_bad_one_fails() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        leases = [rig.call("a", n, method="die" if n == 1 else "echo") for n in range(4)]
        await rig.all(*leases)
        assert [rig.ends[x].state for x in leases] == [DONE, FAILED, DONE, DONE]
        assert [rig.values[leases[n]] for n in (0, 2, 3)] == [{"fake": n} for n in (0, 2, 3)]
        assert rig.ends[leases[1]].reason == "its service copy died: it was told to"
    play(scene)


def test_a_copy_that_dies_while_waking_loses_no_call() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.trouble["wake", "a"] = ServiceDied("killed by somebody")
        lease = rig.call("a", 7)
        await rig.all(lease)
        assert rig.values[lease] == {"fake": 7} and len(rig.of("load")) == 2
    play(scene)


def test_a_batch_too_large_for_memory_is_split_and_a_too_large_call_fails() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        leases = [rig.call("a", n, method=m) for n, m in enumerate(("echo", "too-big", "echo"))]
        await rig.all(*leases)
        assert [rig.ends[x].state for x in leases] == [DONE] * 3
        lease = rig.call("a", method="huge")
        await rig.all(lease)
        assert rig.ends[lease].state is ActionState.OUT_OF_MEMORY
        assert rig.ends[lease].pushed == 0  # the service is on its block, and serves the next call
        await rig.all(rig.call("a"))
        assert rig.ends[rig.lease].state is DONE
    play(scene)


def test_a_copy_that_does_not_fit_on_its_gpus_fails_its_calls_and_stays_parked() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.trouble["wake", "a"] = OutOfDeviceMemory("80 GiB of 8")
        leases = [rig.call("a") for _ in range(2)]
        await rig.all(*leases)
        assert [rig.ends[x].state for x in leases] == [ActionState.OUT_OF_MEMORY] * 2
        assert [rig.ends[x].pushed for x in leases] == [FALTERED] * 2  # nothing is on the block
        await rig.all(rig.call("a"))
        assert len(rig.of("load")) == 1
    play(scene)


def test_a_call_that_times_out_fails_and_the_others_of_its_batch_rerun() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        slow = rig.call("a", 1, method="hang", timeout_s=0.05)
        other = rig.call("a", 2)
        await rig.all(slow, other)
        assert rig.ends[slow].state is ActionState.TIMEOUT
        assert "longer than its limit of 0.05 s" in rig.ends[slow].reason
        assert rig.values[other] == {"fake": 2}
    play(scene)


def test_the_time_of_a_suspension_does_not_count_for_a_call() -> None:
    """As after `scontrol suspend`: the worker was stopped, and so were its copies."""
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.may_end.clear()
        call = rig.call("a", 1, timeout_s=1.9)
        while not rig.of("call"):
            await asyncio.sleep(0.01)
        time.sleep(2.5)  # nothing runs meanwhile
        await asyncio.sleep(0.3)
        assert not any(copy.killed.is_set() for copy in rig.copies)
        rig.may_end.set()
        await rig.all(call)
        assert rig.ends[call].state is DONE
    play(scene)


def test_a_cancelled_call_ends_at_once_and_frees_its_block_with_the_batch() -> None:
    async def scene(rig: Rig) -> None:
        rig.call_s = 0.05
        rig.declare("a", batch=2)
        first, second, third = (rig.call("a", n) for n in range(3))
        while not rig.of("call"):
            await rig_turn()
        rig.executor.kill(third, ActionState.CANCELLED, "no")
        rig.executor.kill(first, ActionState.CANCELLED, "no")
        assert rig.unclean == {first} and rig.ends[third].state is ActionState.CANCELLED
        assert not rig.executor.take_back(second)
        await rig.all(first, second, third)
        assert rig.values[second] == {"fake": 1} and first not in rig.values
        assert rig.ends[first].state is ActionState.CANCELLED
    play(scene)


def test_calls_that_are_cut_short_share_the_time_of_their_batch() -> None:
    """Else the calls of a batch that all time out count its time once each, and a cancelled call
    has held its GPUs for nothing."""
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        late = [rig.call("a", n, method="hang", timeout_s=0.05) for n in range(3)]
        await rig.all(*late)
        assert [rig.ends[x].batch for x in late] == [3, 3, 3]
        assert all(rig.ends[x].exec_ns >= 50_000_000 for x in late)
        rig.may_end.clear()
        began = len(rig.of("call"))
        gone, stays = rig.call("a", 1), rig.call("a", 2)
        while len(rig.of("call")) == began:
            await rig_turn()
        queued = rig.call("a", 3)
        await asyncio.sleep(0.05)
        for lease in (gone, queued):
            rig.executor.kill(lease, ActionState.CANCELLED, "no")
        assert rig.ends[gone].batch == 2 and rig.ends[gone].exec_ns >= 50_000_000
        assert rig.ends[gone].setup_ns >= 0
        assert rig.ends[queued] == Outcome(ActionState.CANCELLED, reason="no")
        rig.may_end.set()
        await rig.all(gone, stays)
    play(scene)


def test_a_call_whose_copies_died_tells_how_long_the_last_one_ran() -> None:
    async def scene(rig: Rig) -> None:
        rig.call_s = 0.02
        rig.declare("a")
        bad = rig.call("a", method="die")
        await rig.all(bad)
        assert rig.ends[bad].state is ActionState.FAILED
        assert rig.ends[bad].exec_ns >= 20_000_000
    play(scene)


def test_a_call_that_has_not_begun_can_be_taken_back() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch=1)
        first, second = rig.call("a"), rig.call("a")
        assert rig.executor.take_back(second)
        await rig.all(first)
        assert second not in rig.ends and second not in rig.executor
    play(scene)


def test_every_call_of_a_service_that_cannot_be_loaded_names_the_reason() -> None:
    async def scene(rig: Rig) -> None:
        rig.trouble["load", "a"] = REFUSED
        rig.declare("a")
        leases = [rig.call("a"), rig.call("a", gpus=(1,)), rig.call("nobody")]
        await rig.all(*leases)
        assert [rig.ends[x].reason for x in leases] == [
            str(REFUSED), str(REFUSED), "key: service 'nobody' is not known to this node"]
    play(scene)


def test_a_copy_that_dies_while_loading_is_loaded_again() -> None:
    async def scene(rig: Rig) -> None:
        rig.trouble["load", "a"] = ServiceDied("killed")
        rig.declare("a")
        await rig.all(rig.call("a"))
        assert rig.ends[rig.lease].state is DONE and len(rig.of("load")) == 2
    play(scene)


def test_a_service_whose_copies_die_while_loading_is_loaded_again_later(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server of an engine is started after its service was declared."""
    monkeypatch.setattr(node_copies, "REFUSED_S", 0.2)

    async def scene(rig: Rig) -> None:
        rig.always["load", "a"] = ServiceDied("no server")
        rig.declare("a")
        early, soon = rig.call("a"), rig.call("a")
        await rig.all(early, soon)
        assert [rig.ends[x].state for x in (early, soon)] == [FAILED] * 2
        assert "it dies while it is loaded: no server" in rig.ends[early].reason
        assert len(rig.of("load")) == 3
        rig.always.clear()
        await asyncio.sleep(0.2)
        later = rig.call("a")
        await rig.all(later)
        assert rig.ends[later].state is DONE
    play(scene)


@pytest.mark.parametrize("fields", [
    {"backend": "http", "url": "http://localhost:1"}, {}], ids=["engine", "other"])
def test_a_service_that_was_refused_is_loaded_again_later(
        monkeypatch: pytest.MonkeyPatch, fields: dict[str, str]) -> None:
    """Somebody may have done meanwhile what the reason says: the owner of an engine started it
    again, or the rest of a model was copied to its folder."""
    monkeypatch.setattr(node_copies, "REFUSED_S", 0.2)

    async def scene(rig: Rig) -> None:
        rig.always["load", "a"] = REFUSED
        rig.declare("a", **fields)
        early, soon = rig.call("a"), rig.call("a")
        await rig.all(early, soon)
        assert [rig.ends[x].reason for x in (early, soon)] == [str(REFUSED)] * 2
        assert len(rig.of("load")) == 1
        await asyncio.sleep(0.2)
        wrong = rig.call("a")
        await rig.all(wrong)
        assert rig.ends[wrong].reason == str(REFUSED)
        rig.always.clear()
        await asyncio.sleep(0.2)
        later = rig.call("a")
        await rig.all(later)
        assert rig.ends[later].state is DONE
    play(scene)


def test_a_wrong_call_fails_alone_and_large_answers_use_the_store() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        wrong, large = rig.call("a", method="wrong"), rig.call("a", "x" * 200_000)
        await rig.all(wrong, large)
        assert rig.ends[wrong].state is FAILED and rig.values[wrong] == "it is wrong"
        assert rig.values[large] == {"fake": "x" * 200_000} and len(rig.store.kept) == 1
    play(scene)


def test_an_answer_that_the_store_cannot_keep_fails_its_call_alone() -> None:
    """The disk is full: the worker must not end for it."""
    async def scene(rig: Rig) -> None:
        rig.declare("a")
        rig.store.full = True
        large, small = rig.call("a", "x" * 200_000), rig.call("a", "y")
        await rig.all(large, small)
        assert rig.ends[large].state is FAILED and "No space left" in rig.ends[large].reason
        assert rig.values[small] == {"fake": "y"}
    play(scene)


def test_closing_the_service_executor_cancels_calls_and_leaves_nothing() -> None:
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch=1)
        leases = [rig.call("a", method="hang"), rig.call("a")]
        while not rig.of("call"):
            await rig_turn()
        rig.executor.close()
        assert [rig.ends[x].state for x in leases] == [ActionState.CANCELLED] * 2
    play(scene)


async def rig_turn() -> None:
    await asyncio.sleep(0.002)


@pytest.mark.parametrize("cache_mib", [0, 2])
@pytest.mark.parametrize("seed", range(12))
def test_every_service_call_ends_once_under_random_failures(seed: int, cache_mib: int) -> None:
    async def scene(rig: Rig) -> None:
        draw = random.Random(seed)
        rig.call_s = 0.001
        for name in "abc":
            rig.declare(name, degrees=(1, 2), batch=draw.randint(1, 4))
        asked: dict[int, tuple[str, int]] = {}
        deaths = dict.fromkeys("abc", 0)
        for n in range(120):
            method = draw.choices(("echo", "die", "too-big", "wrong", "huge"), (80, 4, 6, 5, 5))[0]
            lease = rig.call(draw.choice("abc"), n, method, draw.choice(((0,), (1,), (0, 1))))
            asked[lease] = method, n
            if n in (10, 20, 50, 60, 70, 80):
                order = "wake" if n % 20 else "load"
                if n > 50:
                    order = draw.choice(("stand_by", "park"))
                # two of a service, since a call queue gives up at the third death in a row
                name = draw.choice([each for each in "abc" if deaths[each] < 2])
                deaths[name] += 1
                rig.trouble[order, name] = ServiceDied("!")
            if draw.random() < 0.1:
                rig.executor.kill(draw.choice(list(asked)), ActionState.CANCELLED, "no")
            if draw.random() < 0.3:
                await rig_turn()
        await rig.all(*asked)
        right = {"echo": DONE, "too-big": DONE, "wrong": FAILED, "die": FAILED,
                 "huge": ActionState.OUT_OF_MEMORY}
        for lease, (method, n) in asked.items():
            state = rig.ends[lease].state
            assert state in (right[method], ActionState.CANCELLED), (method, rig.ends[lease])
            if state is DONE:
                assert rig.values[lease] == {"fake": n}
    play(scene, cache_mib=cache_mib)


def test_a_call_and_a_service_that_are_ordered_twice_run_once() -> None:
    async def scene(rig: Rig) -> None:
        rig.call_s = 0.02
        for _ in range(2):
            rig.declare("a", batch=1)
        lease = rig.call("a", 5)
        rig.lease -= 1
        assert rig.call("a", 5) == lease  # while it waits
        while not rig.of("call"):
            await rig_turn()
        rig.lease -= 1
        rig.call("a", 5)  # while it runs
        other = rig.call("a", 6)
        await rig.all(lease, other)
        assert [entry[3] for entry in rig.of("call")] == [[5], [6]]
        assert len(rig.of("load")) == 1
    play(scene)


@pytest.mark.parametrize("cache_mib", [0, 9])
def test_a_service_that_is_declared_otherwise_is_served_by_new_copies(cache_mib: int) -> None:
    """As by a broker that was started again with other settings. The batch that runs goes on."""
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch=1)
        await rig.all(rig.call("a", 0, gpus=(1,)))
        rig.may_end.clear()
        running = rig.call("a", 1, gpus=(0,))
        while len(rig.of("call")) < 2:
            await rig_turn()
        rig.declare("a", batch=2)
        rig.may_end.set()
        later = [rig.call("a", n, gpus=(n % 2,)) for n in (2, 3)]
        await rig.all(running, *later)
        assert [rig.values[n] for n in (running, *later)] == [{"fake": n} for n in (1, 2, 3)]
        served = {entry[3][0]: rig.copies[entry[1] - 1].spec for entry in rig.of("call")}
        assert served[0].batch == served[1].batch == 1
        assert served[2].batch == served[3].batch == 2
        old = [copy for copy in rig.copies if copy.spec.batch == 1]
        assert old and {copy.state for copy in old} == {"closed"}
    play(scene, cache_mib=cache_mib)


def test_calls_that_wait_form_batches_of_a_services_new_declaration() -> None:
    """A queue that is never empty kept the earlier one, and a larger model got too many at once."""
    async def scene(rig: Rig) -> None:
        rig.declare("a", batch=1)
        rig.may_end.clear()
        leases = [rig.call("a", n) for n in range(5)]
        while not rig.of("call"):
            await rig_turn()
        rig.declare("a", batch=2)
        rig.may_end.set()
        await rig.all(*leases)
        assert [entry[3] for entry in rig.of("call")] == [[0], [1, 2], [3, 4]]
    play(scene)


@pytest.mark.parametrize("begun", [False, True])
def test_a_load_of_an_earlier_declaration_is_given_up(begun: bool) -> None:
    """Such a model may be why it was declared otherwise. A load that hangs held up all calls, and
    one that was refused refused those of the new model for some time."""
    async def scene(rig: Rig) -> None:
        rig.never_load.add("a")
        rig.declare("a", batch=1)
        waits = rig.call("a", 6)
        while begun and not rig.of("load"):
            await rig_turn()
        rig.never_load.clear()
        rig.declare("a", batch=2)
        await rig.all(waits, rig.call("a", 7))
        assert [copy.spec.batch for copy in rig.copies] == ([1, 2] if begun else [2])
        assert [copy.state for copy in rig.copies[:-1]] == ["closed"] * begun
    play(scene)
