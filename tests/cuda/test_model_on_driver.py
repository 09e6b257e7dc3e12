"""A whole model on the test driver: torch operations, LoRA kernels and graphs, against the host."""

from __future__ import annotations

import logging

import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.fakecuda.driver import Fault
from rota.gpu.graphs import bucket_of
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.rows import RowInput
from rota.gpu.model.sampling import SamplingParams

from .models import MIXES, PROMPTS, TOKENS, ZOO

CASES = {
    "qwen35_moe": ("experts_router_attn", "all_linear"),
    "qwen35": ("dora", "gdn_all_r4"),
}


@pytest.mark.parametrize(
    ("family", "dtype", "bound"), [("qwen35", "float32", 1e-4), ("qwen35_moe", "bfloat16", 0.1)]
)
def test_hybrid_decode_replays_from_one_graph(both, family, dtype, bound):
    """States, experts and their adapters in a captured step; the third step replays the second's
    graph, and rows change places with their adapters."""
    pair = both(dtype, family)
    for slot, case in enumerate(CASES[family]):
        pair.commit(slot, case)
    pair.continue_prompts(((0, 1), (0, 1), (0, 1), (1, 0)), bound)
    assert pair.here.runner.captured == 1


@pytest.mark.parametrize("family", ["llama", "qwen35", "qwen35_moe"])
def test_a_decode_step_of_more_rows_is_no_more_operations(model_on_driver, family):
    """Each is a launch of its own on a GPU."""
    here = model_on_driver("float32", family)
    recorded = []
    for rows in (1, 4):
        base, before = (-1,) * rows, here.space.recorded
        here.step(base, [0] * rows, [list(prompt) for prompt in PROMPTS[:rows]])
        for more in range(2):  # eagerly, then captured
            here.step(base, [len(p) + more for p in PROMPTS[:rows]], [[5]] * rows)
        recorded.append(here.space.recorded - before)
    assert here.runner.captured == 2
    assert recorded[0] == recorded[1] > 40


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_decode_steps_replay_from_graphs_and_equal_the_host(both, dtype, bound):
    pair = both(dtype)
    for slot, case in enumerate(("attn_mlp_r8", "rslora_r16_bf16", "attn_mlp_r8")):
        pair.commit(slot, case)
    for mix in MIXES:
        pair.continue_prompts((mix,) * 4, bound)
    # One graph with the LoRA kernels in it, one without; each replayed for other adapters since.
    assert pair.here.runner.captured == 2
    assert pair.here.space.recorded > 2 * 40


@pytest.mark.parametrize("most", [3, 7])
def test_any_number_of_rows_has_its_graph_and_no_more_are_made(model_on_driver, most):
    """Symptom elsewhere: captures failed below eight sequences, and their cache grew with steps."""
    here = model_on_driver("float32", max_sequences=most, num_blocks=3 * most)
    for seq in range(len(PROMPTS), most):
        here.runner.open_sequence(seq, PROMPTS[0], SamplingParams())
    here.commit(0, "attn_mlp_r8")
    shapes = {(bucket_of(rows), case) for rows in (1, most) for case in ("none", "routed")}
    for _ in range(3):
        for rows in sorted({1, most}):
            for slot in (-1, 0):
                for start in range(3):
                    mix = [slot, *[-1] * (rows - 1)]
                    here.step(mix, [start] * rows, [[5]] * rows)
    assert here.runner.captured == len(shapes)
    assert len(here.runner._steps._graphs) == len(shapes)


@pytest.mark.parametrize("launch", [1, 2, 5, 9])
@pytest.mark.parametrize("fed", [[9, 8, 7], [9]])
def test_what_a_failed_step_queued_touches_no_other_sequence(model_on_driver, driver, fed, launch):
    """It reads the arrays that the next step fills, whose rows have other states and blocks."""
    here = model_on_driver("float32", "qwen35")
    here.commit(0, "gdn_all_r4")

    def step(seq, slot, start, tokens):
        here.runner.step([RowInput(seq, slot, start, tokens, (seq * 3, seq * 3 + 1), True)])
        return here.logits

    step(1, -1, 0, (14, 50, 3))
    expected = step(1, -1, 3, (7,))
    step(2, -1, 0, (14, 50, 3))
    driver.faults["cuLaunchKernelEx", driver.calls["cuLaunchKernelEx"] + launch] = Fault(
        "cuLaunchKernelEx", 0, 1
    )
    fired = len(driver.fired)
    with pytest.raises(DeviceError):
        step(0, 0, 0, tuple(fed))
    assert len(driver.fired) == fired + 1
    assert torch.equal(step(2, -1, 3, (7,)), expected)


def test_swaps_between_replays_are_seen_and_nothing_is_captured_again(both):
    pair = both("float32")
    device = pair.here.device
    labels = None
    cases = ("attn_mlp_r8", "rslora_r16_bf16")
    for swap in range(8):
        pair.commit(swap % 2, cases[swap // 2 % 2])
        if swap == 0:
            pair.commit(1, cases[1])
        pair.step((0, 1), [0, 0], [[3 + swap], [7]], swap)
        if swap == 2:
            labels = device.live_labels()
    assert pair.here.runner.captured == 1
    assert device.live_labels() == labels


def test_an_adapter_that_landed_ahead_is_served_as_any_other(both):
    pair = both("float32")
    here = pair.here
    source = DirectorySource(here.folder / "adapters" / "attn_mlp_r8")
    image = stage(source, here.runner.layout, base_rows=here.runner.base_rows).image
    assert here.runner.land(image)
    here.runner.commit(0, image)
    pair.there.commit(0, "attn_mlp_r8")
    pair.step((0, -1), [0, 0], [[3], [7]])
    here.runner.relayout(2, 8)  # another pool, another place to land
    assert not here.runner.land(image)
    assert here.device.live_labels().count("lora landing") == 2  # the place and its stream


def test_a_refused_capture_costs_one_line_and_no_step(both, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "rota.gpu.model.torch_step")
    pair = both("float32")

    def refused(self, stream, mode="thread-local"):
        raise DeviceError("not now", code="capture-violation")

    monkeypatch.setattr(type(pair.here.device), "begin_capture", refused)
    for step in range(4):
        pair.step((-1, -1), [0, 0], [[3 + step], [7]])
    assert pair.here.runner.captured == 0
    assert len(caplog.records) == 1 and "without graphs" in caplog.records[0].getMessage()


def test_reading_a_value_while_recording_is_refused(model_on_driver):
    here = model_on_driver("float32", max_loras=0)
    space, device = here.space, here.device
    stream = device.create_stream(label="own")
    x = space.upload(torch.ones(4))
    with space.computing(stream):
        y = x + 1
        device.begin_capture(stream)
        z = x * 3
        with pytest.raises(DeviceError) as caught:
            z.sum().item()
        assert caught.value.code == "capture-violation"
    device.abort_capture_if_active(stream)
    device.synchronize(stream)
    assert y.tolist() == [2.0] * 4 and torch.isnan(z).all()
    device.destroy_stream(stream)


def test_experts_with_vectors_replay_from_a_graph_and_equal_the_host(both):
    pair = both("float32", "qwen3_next", expert_adapters=True)
    for slot, name in enumerate(("experts_dora", "experts_lora_bias")):
        pair.commit(slot, ZOO / "qwen3_next_v4" / name)
    pair.commit(2, ZOO / "qwen3_next" / "experts")
    rows = []
    for mix in ((0, -1, 1, 2), (1, -1, 0, 0), (-1, -1, 2, 2)):
        pair.continue_prompts((mix,) * 4, 1e-4)
        rows.append(pair.here.logits[1])
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])  # base
    assert pair.here.runner.captured == 2


@pytest.mark.parametrize(
    ("family", "room", "names"),
    [
        ("llama", TOKENS, ("embed_head_dora", "head_lora_bias")),
        ("qwen3_next", {"expert_adapters": True}, ("experts", "all_linear")),
    ],
)
def test_annexes_that_trade_places_between_replays_are_seen(both, family, room, names):
    """No graph knows where in the arena an adapter lies."""
    pair = both("float32", family, **room)
    for parts in ((0, 1), (1, 0), (2, 0), (1, 2)):
        for slot in (0, 1):
            pair.here.runner.retire(slot)
            pair.there.runner.retire(slot)
        for slot, part in enumerate(parts):
            pair.commit(slot, ZOO / family / names[slot], part)
        for tokens in ([3], [7]), ([4], [9]):
            pair.step((0, 1), [0, 0], tokens, parts)
    assert pair.here.runner.captured == 1
