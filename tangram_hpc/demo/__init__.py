"""The small main job (`tangram demo`): one RL step over coding tasks with a scripted policy.

With `--mixed`, the step also calls a judge, three teachers and a search endpoint. The trainer ranks
use only the public API. No model is trained here; the reference trainer in `hooks/` does that.
"""
