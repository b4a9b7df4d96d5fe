import sys, time
from pathlib import Path
from tangram_hpc.sim.rl_scenario import read_scenario
from tangram_hpc.sim.rl_systems import SYSTEMS
from tangram_hpc.sim.rl_pipeline import Pipeline
from dataclasses import replace
s0=read_scenario(Path("tangram_hpc/sim/examples/rl-48.toml"))
for idle,crowd in ((300,1000),(500,2000),(1000,1000),(1000,3000),(0,2000)):
    s=replace(s0, router=replace(s0.router,idle=idle,crowded=crowd))
    for n in ("+ degrees","+ C-MLFQ"):
        p=Pipeline(s,[y for y in SYSTEMS if y.name==n][0]).play()
        print(idle,crowd,n,round(p.tokens_per_s),[round(x.rollout_s) for x in p.steps],[round(x.train_s) for x in p.steps],[x.train_gpus for x in p.steps],round(p.moved_share,2),p.steps[3].degrees,p.steps[-1].degrees,flush=True)
