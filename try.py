import sys, time
from pathlib import Path
from tangram_hpc.sim.rl_scenario import read_scenario
from tangram_hpc.sim.rl_systems import SYSTEMS
from tangram_hpc.sim.rl_pipeline import Pipeline
from dataclasses import replace
s=read_scenario(Path("tangram_hpc/sim/examples/rl-48.toml"))
it=int(sys.argv[1]); s=replace(s, run=replace(s.run, iterations=it))
for sy in SYSTEMS:
    if len(sys.argv)>2 and sy.name not in sys.argv[2:]: continue
    t=time.time(); p=Pipeline(s,sy).play()
    print(f"== {sy.name}: {p.tokens_per_s:.0f} tok/s {p.hours:.2f} h busy {p.gpu_busy:.2f} moved {p.moved_share:.2f} [{time.time()-t:.1f} s]",flush=True)
    for st in p.steps: print("  ",st.batch,round(st.mean_tokens),st.train_gpus,st.degrees,f"roll {st.rollout_s:.0f} p90 {st.p90_share:.2f} train {st.train_s:.0f} lent {st.lent_gpu_s:.0f} at {st.trained_at_s:.0f} {'SW' if st.switched else ''}")
