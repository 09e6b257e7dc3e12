"""HTTP: OpenAI's API, vLLM's dynamic LoRA calls and rota's own, over any engine-like object.

Owns nothing of the engine: :func:`~rota.sched.web.app.create_app` takes one that runs (in process,
or a client of an engine process) and gives a Starlette application.
"""
