"""Numba or reference is chosen once; the package lives without numba."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.kernels.host import HostKernels

WITHOUT_NUMBA = """
import logging, sys
sys.modules["numba"] = None
import torch
from rota.gpu.kernels.host import HostKernels
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("rota").addHandler(Keep())
kernels = HostKernels(torch.bfloat16)
assert not kernels.uses_numba
assert len(lines) == 1 and "numba" in lines[0], lines
x = torch.ones(2, 8).bfloat16()
out = torch.empty_like(x)
kernels.rms_norm(x, x[0], 0.0, out)
assert torch.equal(out, x)
HostKernels(torch.bfloat16, use_numba=False)
assert len(lines) == 1
"""


def test_without_numba_the_references_serve() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_NUMBA], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_other_element_types_are_refused() -> None:
    with pytest.raises(DeviceError) as caught:
        HostKernels(torch.float16)
    assert caught.value.code == "unsupported-dtype"
