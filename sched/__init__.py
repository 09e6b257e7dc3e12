"""sched, the mind: the pure core, its anyio shell, Engine, and the faces."""
