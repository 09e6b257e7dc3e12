"""Adapters that change token matrices, under a whole model on the test driver, against the host."""

from __future__ import annotations

import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.fakecuda.driver import Fault

from .models import MIXES, TOKENS, ZOO

ON_TOKENS = {
    "llama": ("embed_head_dora", "embed_head", "head_lora_bias"),
    "qwen2": ("tied_both", "tied_embed", "tied_head"),
}


@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    [("llama", "float32", 1e-5), ("llama", "bfloat16", 0.05), ("qwen2", "float32", 1e-5)],
)
def test_token_matrices_replay_from_a_graph_and_equal_the_host(both, family, dtype, bound):
    """Prompts go through steps of their own; the rest is one graph with the token matrices' kernels
    and, in steps of base rows alone, one without any."""
    pair = both(dtype, family, **TOKENS)
    for slot, name in enumerate(ON_TOKENS[family]):
        pair.commit(slot, ZOO / family / name)
    for mix in MIXES:
        pair.continue_prompts((mix,) * 4, bound)
    assert pair.here.runner.captured == 2


def test_rows_without_such_an_adapter_keep_every_bit_beside_one(model_on_driver, driver):
    here = model_on_driver("bfloat16", **TOKENS)
    here.commit(0, ZOO / "llama" / "embed_head_dora")
    here.commit(1, "attn_mlp_r8")
    seen = []
    launches = ("cuLaunchKernel", "cuLaunchKernelEx")
    before = [driver.calls[call] for call in launches]
    here.step((-1, -1), [0, 0], [[9, 8, 7], [4]])  # nor for prompts of base
    assert [driver.calls[call] for call in launches] == before
    for mix in ((-1, -1, -1, -1), (0, -1, -1, 0), (1, 1, -1, -1), (1, 0, -1, 0)):
        before = driver.calls["cuLaunchKernelEx"]
        for _ in range(3):  # eagerly, captured, replayed
            here.step(mix, [0] * 4, [[9], [8], [7], [6]])
        assert seen or driver.calls["cuLaunchKernelEx"] == before  # no kernel for base rows alone
        seen.append(here.logits)
    assert here.runner.captured == 3  # none, those of the layers, all
    assert torch.equal(seen[1][1:3], seen[0][1:3]) and torch.equal(seen[2][2:], seen[0][2:])
    assert torch.equal(seen[3][2], seen[0][2])
    assert torch.equal(seen[3][0], seen[2][0])  # an adapter of layers alone
    assert not torch.equal(seen[1][0], seen[0][0])


def test_swaps_of_token_matrices_between_replays_are_seen(both):
    """Another adapter in the slot, one with replaced rows as well (whose steps are not captured), a
    chunk that goes through GEMMs beside it, and a pool of another shape."""
    pair = both("float32", **TOKENS | {"overlay_rows": 128})
    here = pair.here
    names = ("embed_head", "head_lora_bias", "embed_head_dora", "embed_rslora", "plain")
    for swap in range(8):
        pair.commit(0, ZOO / "llama" / names[swap % 5])
        if swap == 0:
            pair.commit(1, ZOO / "llama" / "embed_head")
        pair.step((0, 1), [0, 0], [[3 + swap], [7]])
    assert here.runner.captured == 1
    labels = here.device.live_labels()
    pair.commit(0, ZOO / "llama" / "embed_low_head_saved")
    pair.step((0, 1, -1), [0, 0, 0], [[3], [7], [5]])
    pair.step((0, 1, -1), [0, 0, 0], [list(range(3, 21)), [7], [5, 6]])
    pair.step((1, 0, -1), [0, 0, 0], [list(range(3, 21)), [7], [5, 6]])
    assert here.runner.captured == 1 and here.device.live_labels() == labels
    for served in (here, pair.there):
        served.runner.relayout(2, 8)
    pair.commit(1, ZOO / "llama" / "embed_head")
    for token in (3, 4, 5):
        pair.step((-1, 1), [0, 0], [[token], [7]])
    assert here.runner.captured == 2


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuLaunchKernelEx"])
@pytest.mark.parametrize("fed", [[[9, 8, 7], [4]], [[9], [4]]])
def test_any_launch_of_such_a_step_may_fail_and_the_next_step_is_right(
    model_on_driver, driver, fed, call
):
    here = model_on_driver("float32", graphs=False, **TOKENS)
    here.commit(0, ZOO / "llama" / "embed_head_dora")
    args = ((0, -1), [0, 0], fed)
    before = driver.calls[call]
    here.step(*args)
    expected, count = here.logits, driver.calls[call] - before
    assert count >= 2
    for nth in {1, 2, count - 1, count}:
        driver.faults[call, driver.calls[call] + nth] = Fault(call, 0, 1)
        fired = len(driver.fired)
        with pytest.raises(DeviceError):
            here.step(*args)
        assert len(driver.fired) == fired + 1
    here.step(*args)
    assert torch.equal(here.logits, expected)
