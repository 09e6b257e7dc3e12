"""``rota serve`` and ``rota top``: options by flag and file, the processes they start."""

from .entry import add_serve_parser, run_serve
from .top import add_top_parser, run_top

__all__ = ["add_serve_parser", "add_top_parser", "run_serve", "run_top"]
