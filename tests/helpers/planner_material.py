"""Models, hardware and random problems that the planner's tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from tangram_hpc.libra.planner.costs import AnalyticCosts
from tangram_hpc.libra.planner.shapes import Hardware, ModelShape, Request, Rollout, Training

DENSE = ModelShape("dense-14b", 40, 5120, 40, 8, 128, 17408, 151936)
MOE = ModelShape("moe-30b", 48, 2048, 32, 4, 128, 0, 151936, experts=128, top_k=8, expert_ffn=768)
HARDWARE = Hardware("a800", 8, 80 << 30, 312e12, 2.039e12, 200e9, 3.1e9)


REQUESTS = st.builds(Request, st.integers(0, 8000), st.integers(1, 30000),
                     st.one_of(st.just(0), st.integers(0, 10**12)), st.integers(1, 40))


@st.composite
def problems(draw: st.DrawFn) -> tuple[AnalyticCosts, int]:
    model = draw(st.sampled_from([DENSE, MOE]))
    history = draw(st.lists(REQUESTS, min_size=1, max_size=90))
    batch = draw(st.sampled_from([16, 48, 96, 160]))
    rollout = Rollout(max_batch=draw(st.sampled_from([4, 32, 256])))
    costs = AnalyticCosts(model, HARDWARE, Training(batch), rollout, history)
    return costs, draw(st.integers(16, 80))
