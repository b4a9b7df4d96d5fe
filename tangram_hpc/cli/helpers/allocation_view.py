"""The lines in which `tangram info` and `tangram explain allocation` show elastic allocations."""

from __future__ import annotations

from typing import Any

_BRIEF = 3  # number of the newest decisions that `tangram info` prints


def elastic_lines(answer: dict[str, Any], brief: bool = False) -> list[str]:
    """Returns the lines that show the broker's answer about elastic allocations.

    Args:
        answer: The answer.
        brief: Whether to show only the newest decisions and no demand.
    """
    found = [f"elastic  {answer['nodes']}/{answer['max_nodes']} satellite nodes  "
             f"{answer['core_h']:.2f} core-h used, {answer['promised_core_h']:.2f} of "
             f"{answer['max_core_h']:.2f} promised  idle release "
             + (f"{answer['idle_release_s']:.0f} s" if answer["idle_release_s"] else "off"),
             f"         {answer['verdict'] or 'no decision is needed'}"]
    if answer["trouble"]:
        found.append(f"         Slurm: {answer['trouble']}")
    if not brief:
        found += _demand(answer)
    for e in answer["allocations"]:
        if not (brief and e["own"]):
            found.append(_allocation(e))
    for s in answer["left_alone"]:
        found.append(f"REFUSED  {s['name']:<11} {s['rejections']} requests in a row; the next one "
                     f"not before {s['for_s']:.0f} s: {s['why']}")
    decisions = answer["decisions"][-_BRIEF:] if brief else answer["decisions"]
    return found + [f"DECIDED  {d['ago_s']:8.1f} s ago  {d['what']}" for d in decisions]


def _demand(answer: dict[str, Any]) -> list[str]:
    found = []
    for d in answer["demand"]:
        where = f" in {d['component']}" if d["component"] else ""
        drains = ("cannot drain" if d["needs_s"] is None else
                  f"should drain in {d['needs_s']:.1f} s")
        found.append(f"DEMAND   {d['kind']}{where}: {d['held']} units held, the queue {drains} "
                     f"(target {answer['target_s']:.0f} s); {d['waiting']} waiting actions could "
                     f"start on more nodes, {d['bound']} could not"
                     + (f"; {d['sessions']} sessions wait for {d['mem_mib']} MiB"
                        if d["sessions"] else ""))
    return found


def _allocation(e: dict[str, Any]) -> str:
    name = e["name"] or ("the job itself" if e["own"] else "not our request")
    where = ",".join(e["nodes"]) or (e["slurm_reason"] and f"waits: {e['slurm_reason']}") or "-"
    idle = f"  idle {e['idle_s']:.0f} s" if e["idle_s"] else ""
    why = f"  ({e['why']})" if e["why"] else ""
    return (f"ALLOC    {e['job'] or '-':<11} {e['state']:<8} {name:<15} {where:<19} "
            f"{e['for_s']:8.1f} s{idle}{why}")
