import sys
from pathlib import Path
import tangram_hpc.sim.rl_systems as R
from tangram_hpc.sim.rl_scenario import read_scenario
from tangram_hpc.sim.rl_pipeline import Pipeline
from tangram_hpc.core.planner.online import OnlinePlanner
from dataclasses import replace
old=OnlinePlanner.step
def step(self,facts,requests,rollouts):
    a=old(self,facts,requests,rollouts)
    n=self._now
    print("STEP",facts.step,"train",facts.train_ns//10**9,"roll",facts.rollout_ns//10**9,{k:v//10**9 for k,v in rollouts.items()},"factors",self.calibrator.factors())
    if a: print("  ",a.reason,"|",a.verdict.why); 
    if a and a.standing: print("   standing",a.standing.train_gpus,a.standing.price.ns//10**9,a.standing.rollout_ns//10**9,[ (i.degree,i.requests,i.longest,i.ns//10**9) for i in a.standing.instances])
    if a and a.plan:
        for b in a.plan.splits[:6]: print("   plan",b.train_gpus,b.layout,b.price.ns//10**9,b.rollout_ns//10**9,[ (i.degree,i.requests,i.longest,i.ns//10**9) for i in b.instances])
    return a
OnlinePlanner.step=step
s=read_scenario(Path("tangram_hpc/sim/examples/rl-48.toml"))
s=replace(s, run=replace(s.run, iterations=int(sys.argv[1])))
for sy in R.SYSTEMS:
    if sy.name in sys.argv[2:]:
        p=Pipeline(s,sy).play()
        for st in p.steps: print("  ",st.batch,round(st.mean_tokens),st.train_gpus,st.degrees,f"roll {st.rollout_s:.0f} p90 {st.p90_share:.2f} train {st.train_s:.0f} lent {st.lent_gpu_s:.0f} at {st.trained_at_s:.0f} {'SW' if st.switched else ''}")
