"""The demo job's rooms: one RL step over real coding tasks, with a scripted policy."""
