"""What `tangram info` and `tangram explain allocation` say of allocations that grow and shrink."""

from __future__ import annotations

from typing import Any

_BRIEF = 3  # decisions that `info` shows


def elastic_lines(told: dict[str, Any], brief: bool = False) -> list[str]:
    """An answer of the broker as a person reads it; `brief`: the last decisions only."""
    found = [f"elastic  {told['nodes']}/{told['max_nodes']} satellite nodes  "
             f"{told['core_h']:.2f} core-h used, {told['promised_core_h']:.2f} of "
             f"{told['max_core_h']:.2f} promised  idle release "
             + (f"{told['idle_release_s']:.0f} s" if told["idle_release_s"] else "off"),
             f"         {told['verdict'] or 'nothing to decide'}"]
    if told["trouble"]:
        found.append(f"         Slurm: {told['trouble']}")
    if not brief:
        found += _demand(told)
    for e in told["allocations"]:
        if not (brief and e["own"]):
            found.append(_allocation(e))
    for s in told["left_alone"]:
        found.append(f"REFUSED  {s['name']:<12}{s['rejections']} in a row; left alone for "
                     f"{s['for_s']:.0f} s: {s['why']}")
    decisions = told["decisions"][-_BRIEF:] if brief else told["decisions"]
    return found + [f"DECIDED  {d['ago_s']:8.1f} s ago  {d['what']}" for d in decisions]


def _demand(told: dict[str, Any]) -> list[str]:
    found = []
    for d in told["demand"]:
        where = f" in {d['component']}" if d["component"] else ""
        needs = "for ever" if d["needs_s"] is None else f"{d['needs_s']:.1f} s"
        found.append(f"DEMAND   {d['kind']}{where}: {d['held']} held, the queue needs {needs} "
                     f"({told['target_s']:.0f} s is aimed at); {d['waiting']} waiting could start "
                     f"on more nodes, {d['bound']} could not"
                     + (f"; {d['sessions']} sessions wait for {d['mem_mib']} MiB"
                        if d["sessions"] else ""))
    return found


def _allocation(e: dict[str, Any]) -> str:
    name = e["name"] or ("the job itself" if e["own"] else "not asked for by us")
    where = ",".join(e["nodes"]) or (e["slurm_reason"] and f"waits: {e['slurm_reason']}") or "-"
    idle = f"  idle {e['idle_s']:.0f} s" if e["idle_s"] else ""
    why = f"  ({e['why']})" if e["why"] else ""
    return (f"ALLOC    {e['job'] or '-':<12}{e['state']:<9}{name:<16}{where:<20}"
            f"{e['for_s']:8.1f} s{idle}{why}")
