"""``rota bench``: a small load generator that says what it measured and what it could not.

Owns nothing of what it drives: a server over HTTP, an engine process over IPC, or an engine of its
own in this process.
"""

from .command import add_bench_parser, run_bench

__all__ = ["add_bench_parser", "run_bench"]
