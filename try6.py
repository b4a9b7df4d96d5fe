from pathlib import Path
from tangram_hpc.sim.rl_scenario import read_scenario
from tangram_hpc.sim.rl_systems import SYSTEMS
from tangram_hpc.sim.rl_pipeline import Pipeline, request_of
s=read_scenario(Path("tangram_hpc/sim/examples/rl-48.toml"))
P=Pipeline(s,SYSTEMS[0])
for b in range(s.run.iterations):
    ts=P._batch(b); rs=[request_of(t) for t in ts]
    f=lambda d: max(float(P._cost.alone_s(d,r.prompt,r.generated,r.tool_ns/1e9)) for r in rs)
    L=max(rs,key=lambda r:r.generated)
    print(b, L, [round(f(d)) for d in (1,2,4,8)], "tools",round(L.tool_ns/1e9), "turns", max(len(t.turns) for t in ts), "tot",sum(r.generated for r in rs))
