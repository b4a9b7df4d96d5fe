import sys
from pathlib import Path
import tangram_hpc.sim.rl_systems as R
import tangram_hpc.sim.rl_rollout as RR
from tangram_hpc.sim.rl_scenario import read_scenario
from tangram_hpc.sim.rl_pipeline import Pipeline
from dataclasses import replace
log={}
oa=RR.Rollouts._arrive
def arr(self,now,route,mark):
    live=self._live.get(route.request)
    if live and live.asked==mark:
        e=self._engines[route.instance]
        log.setdefault(route.request,[]).append([now/1e9,e.degree,live.bucket,e.load,live.left,route.how[0],live.unread,len(e._line)])
    oa(self,now,route,mark)
RR.Rollouts._arrive=arr
of=RR.Rollouts._finish
fin=[]
def f(self,now,request,live):
    fin.append((now/1e9,request,live.batch,live.one)); of(self,now,request,live)
RR.Rollouts._finish=f
s=read_scenario(Path("tangram_hpc/sim/examples/rl-48.toml"))
s=replace(s, run=replace(s.run, iterations=2))
sy=[y for y in R.SYSTEMS if y.name==sys.argv[1]][0]
P=Pipeline(s,sy); print(P._shares); P.play()
for t,r,b,one in [x for x in fin if x[2]==0][-4:]:
    print(round(t),r,one.generated,[(u.tool,u.tokens,u.generated) for u in one.turns][:4])
    for l in log[r]: print("     ",[round(x) if isinstance(x,float) else x for x in l])
