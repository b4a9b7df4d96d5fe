"""The main job in small (`tangram demo`): an RL step over coding tasks with a scripted policy.

With `--mixed` it also calls a judge, teachers and a search endpoint. Its ranks use the public API
alone. No model is trained here; the reference trainer in `hooks/` does that.
"""
