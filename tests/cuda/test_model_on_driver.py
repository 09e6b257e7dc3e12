"""A whole model on the test driver: torch operations, LoRA kernels and graphs, against the host."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rota.errors import DeviceError
from rota.gpu.fakecuda.driver import Fault
from rota.gpu.graphs import bucket_of
from rota.gpu.host import HostDevice
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.batch import RowInput
from rota.gpu.model.options import RunnerOptions
from rota.gpu.model.runner import Runner
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_runner import TorchRunner

ZOO = Path(__file__).resolve().parents[1] / "zoo"
OPTIONS = {
    "max_loras": 3,
    "max_lora_rank": 16,
    "num_blocks": 16,
    "max_step_tokens": 32,
    "max_sequences": 4,
}
PROMPTS = ([44, 54, 99], [14, 50], [102, 37, 66, 50], [6, 5, 38])
CASES = {
    "qwen35_moe": ("experts_router_attn", "all_linear"),
    "qwen35": ("dora", "gdn_all_r4"),
}
MIXES = ((0, -1, 1, 0), (-1, 1, 1, 2), (0, 1, 2, -1), (-1, -1, -1, -1))
"""The third: as many adapters as there are slots, and a base row."""


class Served:
    """A runner on one device, its adapters, and the logits of the last step."""

    def __init__(self, runner, folder):
        self.runner, self.folder, self.logits = runner, folder, None
        runner.logits_sink = self.keep
        for seq in range(4):
            runner.open_sequence(seq, PROMPTS[seq], SamplingParams())

    def keep(self, seqs, logits):
        self.logits = logits.float().clone()

    def commit(self, slot, case, part=None):
        """``case``: a name of the oracle's, or a folder. Its annex goes to part ``part`` of the
        arena, default the slot's own."""
        source = DirectorySource(self.folder / "adapters" / case)
        image = stage(source, self.runner.layout, base_rows=self.runner.base_rows).image
        info = self.runner.info
        size = info.arena_bytes // info.max_loras // 256 * 256
        extent = size * (slot if part is None else part)
        self.runner.commit(slot, image, extent if image.annex_bytes else None)

    def step(self, slots, start, tokens):
        rows = [
            RowInput(seq, slot, start[seq], tuple(tokens[seq]), (seq * 3, seq * 3 + 1), True)
            for seq, slot in enumerate(slots)
        ]
        outputs = self.runner.step(rows)
        assert [output.error for output in outputs] == [None] * len(slots)
        return [output.token for output in outputs]


@pytest.fixture
def on_driver(cuda_machine, driver, data_dir):
    """``open(dtype)``: a `Served` on the test driver; leaves nothing behind."""
    if driver is None:
        pytest.skip("runs torch on the test driver; on a GPU see bench/gpu_all.py")
    from rota.gpu.fakecuda.torch_queue import QueueSpace

    opened = []

    def make(dtype, family="llama", graphs=True, **more):
        device = cuda_machine.open(checked=True)
        space = QueueSpace(device, driver)
        folder = data_dir / "oracle" / family
        more = {"expert_adapters": family == "qwen35_moe"} | more
        options = RunnerOptions(dtype=dtype, **(OPTIONS | more))
        runner = TorchRunner.load(folder / "base", device, options, space=space, graphs=graphs)
        opened.append((runner, space))
        return Served(runner, folder), space, device

    yield make
    for runner, space in opened:
        runner.close()
        space.close()
    assert driver.live() == {}, driver.story


@pytest.fixture
def on_host(data_dir):
    """The same on the host."""
    opened = []

    def make(dtype, family="llama", **more):
        folder = data_dir / "oracle" / family
        more = {"expert_adapters": family == "qwen35_moe"} | more
        runner = Runner.load(
            folder / "base", HostDevice(), RunnerOptions(dtype=dtype, **(OPTIONS | more))
        )
        opened.append(runner)
        return Served(runner, folder)

    yield make
    for runner in opened:
        runner.close()


@pytest.mark.parametrize(
    ("family", "dtype", "bound"), [("qwen35", "float32", 1e-4), ("qwen35_moe", "bfloat16", 0.1)]
)
def test_hybrid_decode_replays_from_one_graph(on_driver, on_host, family, dtype, bound):
    """States, experts and their adapters in a captured step; the third step replays the second's
    graph, and rows change places with their adapters."""
    here, there = on_driver(dtype, family)[0], on_host(dtype, family)
    for served in (here, there):
        for slot, case in enumerate(CASES[family]):
            served.commit(slot, case)
    fed = [list(prompt) for prompt in PROMPTS[:2]]
    start = [0] * 2
    for step, mix in enumerate(((0, 1), (0, 1), (0, 1), (1, 0))):
        tokens = [fed[seq][start[seq] :] for seq in range(2)]
        here.step(mix, start, tokens)
        chosen = there.step(mix, start, tokens)
        error = (here.logits - there.logits).abs().max() / there.logits.abs().max()
        assert float(error) < bound, step
        for seq in range(2):
            start[seq] = len(fed[seq])
            fed[seq].append(chosen[seq])
    assert here.runner.captured == 1


@pytest.mark.parametrize("family", ["llama", "qwen35", "qwen35_moe"])
def test_a_decode_step_of_more_rows_is_no_more_operations(on_driver, family):
    """Each is a launch of its own on a GPU."""
    here, space, _ = on_driver("float32", family)
    recorded = []
    for rows in (1, 4):
        base, before = (-1,) * rows, space.recorded
        here.step(base, [0] * rows, [list(prompt) for prompt in PROMPTS[:rows]])
        for more in range(2):  # eagerly, then captured
            here.step(base, [len(p) + more for p in PROMPTS[:rows]], [[5]] * rows)
        recorded.append(space.recorded - before)
    assert here.runner.captured == 2
    assert recorded[0] == recorded[1] > 40


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_decode_steps_replay_from_graphs_and_equal_the_host(on_driver, on_host, dtype, bound):
    here, space, _ = on_driver(dtype)
    there = on_host(dtype)
    for served in (here, there):
        for slot, case in enumerate(("attn_mlp_r8", "rslora_r16_bf16", "attn_mlp_r8")):
            served.commit(slot, case)
    for mix in MIXES:
        fed = [list(prompt) for prompt in PROMPTS]
        start = [0] * 4
        for step in range(4):
            tokens = [fed[seq][start[seq] :] for seq in range(4)]
            here.step(mix, start, tokens)
            chosen = there.step(mix, start, tokens)
            error = (here.logits - there.logits).abs().max() / there.logits.abs().max()
            assert float(error) < bound, (mix, step)
            for seq in range(4):
                start[seq] = len(fed[seq])
                fed[seq].append(chosen[seq])
    # One graph with the LoRA kernels in it, one without; each replayed for other adapters since.
    assert here.runner.captured == 2
    assert space.recorded > 2 * 40


@pytest.mark.parametrize("most", [3, 7])
def test_any_number_of_rows_has_its_graph_and_no_more_are_made(on_driver, most):
    """Symptom elsewhere: captures failed below eight sequences, and their cache grew with steps."""
    here = on_driver("float32", max_sequences=most, num_blocks=3 * most)[0]
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
def test_what_a_failed_step_queued_touches_no_other_sequence(on_driver, driver, fed, launch):
    """It reads the arrays that the next step fills, whose rows have other states and blocks."""
    here = on_driver("float32", "qwen35")[0]
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


def test_swaps_between_replays_are_seen_and_nothing_is_captured_again(on_driver, on_host):
    here, _, device = on_driver("float32")
    there = on_host("float32")
    labels = None
    cases = ("attn_mlp_r8", "rslora_r16_bf16")
    for swap in range(8):
        for served in (here, there):
            served.commit(swap % 2, cases[swap // 2 % 2])
            if swap == 0:
                served.commit(1, cases[1])
        for served in (here, there):
            served.step((0, 1), [0, 0], [[3 + swap], [7]])
        assert torch.allclose(here.logits, there.logits, rtol=1e-4, atol=1e-4), swap
        if swap == 2:
            labels = device.live_labels()
    assert here.runner.captured == 1
    assert device.live_labels() == labels


def test_an_adapter_that_landed_ahead_is_served_as_any_other(on_driver, on_host):
    here, _, device = on_driver("float32")
    there = on_host("float32")
    source = DirectorySource(here.folder / "adapters" / "attn_mlp_r8")
    image = stage(source, here.runner.layout, base_rows=here.runner.base_rows).image
    assert here.runner.land(image)
    here.runner.commit(0, image)
    there.commit(0, "attn_mlp_r8")
    for served in (here, there):
        served.step((0, -1), [0, 0], [[3], [7]])
    assert torch.allclose(here.logits, there.logits, rtol=1e-4, atol=1e-4)
    here.runner.relayout(2, 8)  # another pool, another place to land
    assert not here.runner.land(image)
    assert device.live_labels().count("lora landing") == 2  # the place and its stream


def test_a_refused_capture_costs_one_line_and_no_step(on_driver, on_host, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "rota.gpu.model.torch_step")
    here, _, device = on_driver("float32")
    there = on_host("float32")

    def refused(self, stream, mode="thread-local"):
        raise DeviceError("not now", code="capture-violation")

    monkeypatch.setattr(type(device), "begin_capture", refused)
    for step in range(4):
        for served in (here, there):
            served.step((-1, -1), [0, 0], [[3 + step], [7]])
        assert torch.allclose(here.logits, there.logits, rtol=1e-4, atol=1e-4)
    assert here.runner.captured == 0
    assert len(caplog.records) == 1 and "without graphs" in caplog.records[0].getMessage()


def test_reading_a_value_while_recording_is_refused(on_driver):
    _, space, device = on_driver("float32", max_loras=0)
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


def test_experts_with_vectors_replay_from_a_graph_and_equal_the_host(on_driver, on_host):
    room = {"expert_adapters": True}
    here = on_driver("float32", "qwen3_next", **room)[0]
    there = on_host("float32", "qwen3_next", **room)
    for served in (here, there):
        for slot, name in enumerate(("experts_dora", "experts_lora_bias")):
            served.commit(slot, ZOO / "qwen3_next_v4" / name)
        served.commit(2, ZOO / "qwen3_next" / "experts")
    rows = []
    for mix in ((0, -1, 1, 2), (1, -1, 0, 0), (-1, -1, 2, 2)):
        fed, start = [list(prompt) for prompt in PROMPTS], [0] * 4
        for step in range(4):
            tokens = [fed[seq][start[seq] :] for seq in range(4)]
            here.step(mix, start, tokens)
            chosen = there.step(mix, start, tokens)
            error = (here.logits - there.logits).abs().max() / there.logits.abs().max()
            assert float(error) < 1e-4, (mix, step)
            for seq in range(4):
                start[seq] = len(fed[seq])
                fed[seq].append(chosen[seq])
        rows.append(here.logits[1])
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])  # base
    assert here.runner.captured == 2


TOKENS = {"max_embedding_rank": 4, "overlay_rows": 8}
"""Room for the adapters of the zoo that change token matrices."""
ON_TOKENS = {
    "llama": ("embed_head_dora", "embed_head", "head_lora_bias"),
    "qwen2": ("tied_both", "tied_embed", "tied_head"),
}


@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    [("llama", "float32", 1e-5), ("llama", "bfloat16", 0.05), ("qwen2", "float32", 1e-5)],
)
def test_token_matrices_replay_from_a_graph_and_equal_the_host(
    on_driver, on_host, family, dtype, bound
):
    """Prompts go through steps of their own; the rest is one graph with the token matrices' kernels
    and, in steps of base rows alone, one without any."""
    here, there = on_driver(dtype, family, **TOKENS)[0], on_host(dtype, family, **TOKENS)
    for served in (here, there):
        for slot, name in enumerate(ON_TOKENS[family]):
            served.commit(slot, ZOO / family / name)
    for mix in MIXES:
        fed, start = [list(prompt) for prompt in PROMPTS], [0] * 4
        for step in range(4):
            tokens = [fed[seq][start[seq] :] for seq in range(4)]
            here.step(mix, start, tokens)
            chosen = there.step(mix, start, tokens)
            error = (here.logits - there.logits).abs().max() / there.logits.abs().max()
            assert float(error) < bound, (mix, step)
            for seq in range(4):
                start[seq] = len(fed[seq])
                fed[seq].append(chosen[seq])
    assert here.runner.captured == 2


def test_rows_without_such_an_adapter_keep_every_bit_beside_one(on_driver, driver):
    here = on_driver("bfloat16", **TOKENS)[0]
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


def test_swaps_of_token_matrices_between_replays_are_seen(on_driver, on_host):
    """Another adapter in the slot, one with replaced rows as well (whose steps are not captured), a
    chunk that goes through GEMMs beside it, and a pool of another shape."""
    here, _, device = on_driver("float32", **TOKENS | {"overlay_rows": 128})
    there = on_host("float32", **TOKENS | {"overlay_rows": 128})
    names = ("embed_head", "head_lora_bias", "embed_head_dora", "embed_rslora", "plain")

    def both(slots, start, tokens):
        for served in (here, there):
            served.step(slots, start, tokens)
        assert torch.allclose(here.logits, there.logits, rtol=1e-4, atol=1e-4)

    for swap in range(8):
        for served in (here, there):
            served.commit(0, ZOO / "llama" / names[swap % 5])
            if swap == 0:
                served.commit(1, ZOO / "llama" / "embed_head")
        both((0, 1), [0, 0], [[3 + swap], [7]])
    assert here.runner.captured == 1
    labels = device.live_labels()
    for served in (here, there):
        served.commit(0, ZOO / "llama" / "embed_low_head_saved")
    both((0, 1, -1), [0, 0, 0], [[3], [7], [5]])
    both((0, 1, -1), [0, 0, 0], [list(range(3, 21)), [7], [5, 6]])
    both((1, 0, -1), [0, 0, 0], [list(range(3, 21)), [7], [5, 6]])
    assert here.runner.captured == 1 and device.live_labels() == labels
    for served in (here, there):
        served.runner.relayout(2, 8)
        served.commit(1, ZOO / "llama" / "embed_head")
    for token in (3, 4, 5):
        both((-1, 1), [0, 0], [[token], [7]])
    assert here.runner.captured == 2


@pytest.mark.parametrize(
    ("family", "room", "names"),
    [
        ("llama", TOKENS, ("embed_head_dora", "head_lora_bias")),
        ("qwen3_next", {"expert_adapters": True}, ("experts", "all_linear")),
    ],
)
def test_annexes_that_trade_places_between_replays_are_seen(
    on_driver, on_host, family, room, names
):
    """No graph knows where in the arena an adapter lies."""
    here, there = on_driver("float32", family, **room)[0], on_host("float32", family, **room)
    for parts in ((0, 1), (1, 0), (2, 0), (1, 2)):
        for served in (here, there):
            for slot in (0, 1):
                served.runner.retire(slot)
            for slot, part in enumerate(parts):
                served.commit(slot, ZOO / family / names[slot], part)
        for tokens in ([3], [7]), ([4], [9]):
            for served in (here, there):
                served.step((0, 1), [0, 0], tokens)
            assert torch.allclose(here.logits, there.logits, rtol=1e-4, atol=1e-4), parts
    assert here.runner.captured == 1


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuLaunchKernelEx"])
@pytest.mark.parametrize("fed", [[[9, 8, 7], [4]], [[9], [4]]])
def test_any_launch_of_such_a_step_may_fail_and_the_next_step_is_right(
    on_driver, driver, fed, call
):
    here = on_driver("float32", graphs=False, **TOKENS)[0]
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
