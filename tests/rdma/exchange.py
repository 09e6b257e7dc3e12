"""What tests of a real peer share: a bare client, one's refusal, and landed compared to disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rota.errors import RotaError
from rota.gpu.lora.stage import StagedAdapter
from rota.rdma.address import parse_address
from rota.rdma.frames2 import Times
from rota.rdma.link import Link, SocketStream


def same(landed: StagedAdapter, disk: StagedAdapter) -> None:
    a, b = landed.image, disk.image
    assert a.buffer.tobytes() == b.buffer.tobytes()
    for name in ("digest", "fingerprint", "present", "ranks", "embed_rows", "head_rows", "affine"):
        assert getattr(a, name) == getattr(b, name)
    np.testing.assert_array_equal(a.scales, b.scales)
    for array in (a.scales, *(() if a.annex is None else (a.annex.pairs, a.annex.vectors))):
        assert not array.flags.writeable
    for name in ("pairs", "tensors", "by_module", "ranks", "scales", "notes", "ignored", "dtypes"):
        assert getattr(landed.report, name) == getattr(disk.report, name)


def refusal(call: Callable[[], Any]) -> RotaError:
    with pytest.raises(RotaError) as caught:
        call()
    return caught.value


def connected(running: Any, kit: Any, times: Times | None = None) -> Link:
    times = Times() if times is None else times
    stream = SocketStream(parse_address(running.address), 5.0)
    try:
        return Link(stream, bytes(32), kit.secret, times, stream._clock() + 60)
    except RotaError:
        stream.close()
        raise
