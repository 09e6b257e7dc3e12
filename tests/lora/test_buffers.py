"""Where buffers for files and slots begin and end."""

from __future__ import annotations

import numpy as np
import pytest

from rota.gpu.host_memory import HUGE_PAGE
from rota.gpu.lora.buffers import LARGE, PAGE, blank


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, LARGE - 1])
def test_a_buffer_begins_a_page_and_has_the_bytes_asked_for(nbytes: int) -> None:
    made = blank(nbytes)
    assert made.shape == (nbytes,)
    assert made.dtype == np.uint8
    assert made.flags.writeable
    assert made.ctypes.data % PAGE == 0


@pytest.mark.parametrize("nbytes", [LARGE, LARGE + 1, LARGE + HUGE_PAGE - 1])
def test_a_large_buffer_has_its_huge_pages_to_itself(nbytes: int) -> None:
    made = blank(nbytes)
    assert made.shape == (nbytes,)
    assert made.ctypes.data % HUGE_PAGE == 0
    memory = made.base
    assert isinstance(memory, np.ndarray)
    last = -(-(made.ctypes.data + nbytes) // HUGE_PAGE) * HUGE_PAGE
    assert last <= memory.ctypes.data + memory.nbytes
