import sys, time
from pathlib import Path
from tangram_hpc.sim.rl_scenario import read_scenario
from tangram_hpc.sim.rl_systems import SYSTEMS
from tangram_hpc.sim.rl_pipeline import Pipeline
from dataclasses import replace
s0=read_scenario(Path("tangram_hpc/sim/examples/rl-48.toml"))
P,ST,IT=map(int,sys.argv[1:4])
s=replace(s0,run=replace(s0.run,iterations=IT,prompts=P,train_steps=ST),training=replace(s0.training,batch=P*16))
for sy in [y for y in SYSTEMS if len(sys.argv)<5 or y.name in sys.argv[4:]]:
    try: p=Pipeline(s,sy).play()
    finally: pass
    print(f"{sy.name:16}{p.tokens_per_s:7.0f}",[round(x.rollout_s) for x in p.steps],[round(x.train_s) for x in p.steps],[x.train_gpus for x in p.steps],p.steps[0].degrees,"|",p.steps[-1].degrees,flush=True)
