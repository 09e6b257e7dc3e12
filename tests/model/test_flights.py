"""Two steps in flight: to the last bit the answers of one at a time, and no wait in between.

On the host in place of an accelerator, where torch works at the call, and on the test driver, where
work is done only when something waits for it: there a step that read its rows, its tokens or its
results at the wrong moment answers something else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import DeviceError, InternalError
from rota.gpu.decorators import Fault, FaultyDevice, TracingDevice
from rota.gpu.lora.image import SlotImage
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import stage
from rota.gpu.model.rows import RowInput
from rota.gpu.model.sampling import SamplingParams
from rota.gpu.model.torch_batch import DeviceBatch
from rota.gpu.model.torch_runner import TorchRunner

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_loras": 3, "max_lora_rank": 16, "num_blocks": 40, "max_sequences": 6,
    "max_step_tokens": 64, "spill_bytes": 1 << 20, "snapshots": 2,
}  # fmt: skip
CASES = {"llama": ("attn_mlp_r8", "rslora_r16_bf16"), "qwen35": ("gdn_all_r4", "dora")}
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.1, seed=3)
CUT = SamplingParams(temperature=0.9, top_k=9, top_p=0.9, min_p=0.01, seed=4)
LOGPROBS = SamplingParams(logprobs=2)
PENALISED = SamplingParams(
    temperature=0.8, seed=6, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.4
)
BANNED = SamplingParams(min_tokens=3, stop_token_ids=tuple(range(60)))
Sequences = dict[int, tuple[int, SamplingParams]]
"""Slot and sampling of each sequence."""
ON_DEVICE: Sequences = {0: (-1, GREEDY), 1: (0, DRAWN), 2: (1, CUT), 3: (0, GREEDY)}
ON_HOST: Sequences = {
    0: (-1, GREEDY), 1: (0, LOGPROBS), 2: (1, PENALISED), 3: (-1, BANNED), 4: (0, DRAWN),
}  # fmt: skip
ONE_ADAPTER: Sequences = {0: (-1, GREEDY), 1: (-1, DRAWN), 2: (1, CUT), 3: (-1, GREEDY)}
Make = Callable[..., TorchRunner]


@pytest.fixture
def make(traced: Make, data_dir: Path) -> Make:
    """``make(family, **more)``: a `traced` runner with two adapters committed."""

    def load(family: str = "llama", **more: Any) -> TorchRunner:
        runner = traced(family, **(OPTIONS | more))
        for slot, case in enumerate(CASES[family]):
            commit(runner, slot, data_dir / "oracle" / family / "adapters" / case)
        return runner

    return load


def commit(runner: TorchRunner, slot: int, folder: Path) -> None:
    staged = stage(DirectorySource(folder), runner.layout, base_rows=runner.base_rows)
    runner.commit(slot, staged.image)


def prompt(seq: int) -> list[int]:
    return [(5 * seq + 7 * i) % 90 + 1 for i in range(3 + seq)]


class Play:
    """Steps of sequences that each have three blocks, ``depth`` of them in flight."""

    def __init__(self, runner: Any, sequences: Sequences, depth: int) -> None:
        self.runner, self.sequences, self.depth = runner, sequences, depth
        self.at = dict.fromkeys(sequences, 0)
        self.known = {seq: prompt(seq) for seq in sequences}
        self.blocks = {seq: (seq * 3, seq * 3 + 1, seq * 3 + 2) for seq in sequences}
        self.before: list[int] = []
        self.flights: list[tuple[list[int], Any]] = []
        self.answers: list[list[Any]] = []
        for seq, (_, sampling) in sequences.items():
            runner.open_sequence(seq, prompt(seq), sampling)

    def row(self, seq: int) -> RowInput:
        start, known = self.at[seq], self.known[seq]
        tokens: tuple[int, ...] = tuple(known[start:]) if start < len(known) else ()
        if seq in self.before and start:
            tokens = (~self.before.index(seq),) if self.depth == 2 else tokens
        self.at[seq] += len(tokens)
        slot = self.sequences[seq][0]
        return RowInput(seq, slot, start, tokens, self.blocks[seq], True)

    def step(self, seqs: list[int]) -> None:
        """Queue one step, then finish what is not to be in flight any more."""
        flight = self.runner.begin([self.row(seq) for seq in seqs])
        self.before = seqs
        self.flights.append((seqs, flight))
        self.finish(self.depth - 1)

    def finish(self, left: int = 0) -> list[list[Any]]:
        while len(self.flights) > left:
            seqs, flight = self.flights.pop(0)
            outputs = flight.finish()
            self.answers.append(outputs)
            for seq, output in zip(seqs, outputs, strict=True):
                if output.error is None:
                    self.known[seq].append(output.token)
        return self.answers

    def end(self) -> list[list[Any]]:
        answers = self.finish()
        for seq in self.sequences:
            self.runner.close_sequence(seq)
        return answers


def day(runner: Any, folder: Path, family: str, sequences: Sequences, depth: int) -> Any:
    """Rows that come and go and change places, a swap, a spill and an end behind steps in flight.
    A row that comes back, or one that goes to host memory, is not in the last step in flight."""
    play = Play(runner, sequences, depth)
    everyone = list(sequences)
    play.step(everyone)
    for turn in range(3):
        play.step(everyone[turn % 2 :] + everyone[: turn % 2])
    commit(runner, 2, folder / "oracle" / family / "adapters" / CASES[family][1])
    play.step(everyone[::-1])
    play.step(everyone[1:])  # the first one's row, known to have ended, is left out
    play.step(everyone[1:])
    runner.drop_state(0)
    runner.close_sequence(0)  # while two steps are in flight
    play.step(everyone[1:])
    play.step([everyone[2], everyone[-1]])  # the second is left out
    runner.spill(1, play.blocks[1][:1])
    play.step([everyone[-1], everyone[2]])
    play.blocks[1] = (30, 31, 32)
    runner.restore(1, [(0, 30)])
    play.finish(1)
    play.step([2, 1, everyone[-1]])
    play.step([everyone[-1], 1, 2])
    return play.end()


@pytest.mark.parametrize(
    ("machine", "family", "sequences"),
    [
        ("host", "llama", ON_DEVICE),
        ("host", "llama", ON_HOST),
        ("host", "qwen35", ON_DEVICE),
        ("host", "qwen35", ON_HOST),
        ("driver", "llama", ON_DEVICE),
        ("driver", "qwen35", ONE_ADAPTER),
    ],
)
def test_answers_are_those_of_one_step_at_a_time(
    make: Make, data_dir: Path, family: str, sequences: Sequences
) -> None:
    runner = make(family)
    alone = day(runner, data_dir, family, sequences, 1)
    over = day(runner, data_dir, family, sequences, 2)
    assert over == alone
    assert all(output.error is None for step in alone for output in step)
    assert len({output.token for step in alone for output in step}) > 10


def test_a_snapshot_that_a_step_in_flight_takes_can_be_loaded_by_the_next(make: Make) -> None:
    runner = make("qwen35")
    shared = tuple(range(1, 17))

    def run(wait: bool) -> Any:
        for seq in (0, 1):
            runner.open_sequence(seq, shared, LOGPROBS if wait else GREEDY)
        first = runner.begin([RowInput(0, -1, 0, shared, (0,), True, save=1)])
        assert first.settled is wait
        rows = [RowInput(0, -1, 16, (~0,), (0, 1), True)]
        rows.append(RowInput(1, -1, 16, (5, 6), (0, 2), True, load=1))
        tokens = [
            output.token for flight in (runner.begin(rows), first) for output in flight.finish()
        ]
        for seq in (0, 1):
            runner.close_sequence(seq)
        return tokens

    assert run(False) == run(True)


def warm(make: Make, sequences: Sequences, **more: Any) -> tuple[Any, Play]:
    """Steps on their way, two deep: their graph is captured, the last of them is in flight."""
    runner: Any = make(**more)
    play = Play(runner, sequences, 2)
    for _ in range(4):
        play.step(list(sequences))
    return runner, play


@pytest.mark.parametrize("machine", ["driver"])
def test_nothing_is_waited_for_between_two_steps(make: Make) -> None:
    runner, play = warm(make, ON_DEVICE)
    captured = runner.captured
    play.finish()
    play.step(list(ON_DEVICE))  # behind nothing; it is queued and, so far, none of it has run
    (stream,) = (s for s in runner.driver.streams.values() if s.done < s.queued)
    done, calls = stream.done, len(runner.trace)
    runner.begin([play.row(seq) for seq in ON_DEVICE])
    between = [line.split()[0] for line in runner.trace[calls:]]
    assert set(between) == {"copy_h2d", "replay", "copy_d2h", "record_event"}
    assert between.count("replay") == 1 and runner.captured == captured > 0
    assert stream.done == done, "work of the first step was done to queue the second"


@pytest.mark.parametrize("machine", ["driver"])
def test_a_step_the_host_has_to_choose_for_is_over_when_it_is_queued(make: Make) -> None:
    _, play = warm(make, ON_HOST)
    play.step(list(ON_HOST))
    assert [flight.settled for _, flight in play.flights] == [True]


def wrong_twin(real: Any) -> Any:
    return lambda self, batch, *, twin, **more: real(self, batch, twin=0, **more)


def wrong_row(real: Any) -> Any:
    def send(self: Any, batch: Any, *, fed: Any, **more: Any) -> None:
        places = [place for _, place in fed]
        turned = [(token, at) for (token, _), at in zip(fed, places[1:] + places[:1], strict=True)]
        real(self, batch, fed=turned, **more)

    return send


@pytest.mark.parametrize("machine", ["driver"])
@pytest.mark.parametrize("fault", ["reads before the event", "pinned block", "wrong row"])
def test_a_planted_fault_is_seen(make: Make, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    runner = make()

    def run() -> list[list[Any]]:
        play = Play(runner, ON_DEVICE, 2)
        for _ in range(6):
            play.step(list(ON_DEVICE))
        return play.end()

    right = run()
    assert run() == right
    if fault == "reads before the event":
        monkeypatch.setattr(TracingDevice, "synchronize_event", lambda self, event: None)
    elif fault == "pinned block":
        monkeypatch.setattr(DeviceBatch, "send", wrong_twin(DeviceBatch.send))
    else:
        monkeypatch.setattr(DeviceBatch, "send", wrong_row(DeviceBatch.send))
    assert run() != right


def all_nan(runner: TorchRunner) -> SlotImage:
    layout, pairs = runner.layout, len(runner.layout.pairs)
    buffer = np.zeros(layout.slot_bytes, np.uint8)
    for part in layout.pair_views(buffer, 0):
        part[:] = np.nan
    scales = np.array([1.0] + [0.0] * (pairs - 1), np.float32)
    present = tuple(at == 0 for at in range(pairs))
    return SlotImage(buffer, present, scales, (16,) + (0,) * (pairs - 1), "x", layout.fingerprint())


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, CUT])
def test_a_row_fed_by_unusable_logits_fails_alone(make: Make, sampling: SamplingParams) -> None:
    """Two rows behind: the sample of the second is none either, and nobody else's changes."""
    runner: Any = make()
    runner.commit(2, all_nan(runner))
    sequences = {0: (-1, GREEDY), 1: (2, sampling), 2: (0, DRAWN), 3: (1, CUT)}
    told = []
    for depth in (1, 2):
        play = Play(runner, sequences, depth)
        play.sequences = sequences | {1: (-1, sampling)}
        play.step([0, 1, 2, 3])
        play.sequences = sequences
        play.step([2, 1, 3, 0])
        if depth == 1:
            play.known[1].append(0)  # what its row is fed does not matter to the others
        play.step([1, 0, 2, 3])
        play.step([0, 2, 3])
        told.append(play.end())
    codes = [
        [None if output.error is None else output.error.code for output in step]
        for step in told[1][1:3]
    ]
    assert codes == [[None, "bad-logits", None, None], ["row-not-fed", None, None, None]]
    for alone, over in zip(*told, strict=True):
        assert [o for o in over if o.seq != 1] == [o for o in alone if o.seq != 1]


def test_behind_a_step_that_could_not_be_queued_nobody_is_fed(make: Make) -> None:
    """Not even by the step before that one, whose results come later."""
    _, play = warm(make, ON_DEVICE)
    runner = play.runner
    with pytest.raises(InternalError) as caught:
        runner.begin([RowInput(0, -1, 0, (1,), (99,), True)])
    assert caught.value.code == "bad-row"
    play.finish()
    outputs = runner.begin([play.row(seq) for seq in ON_DEVICE]).finish()
    assert [output.error.code for output in outputs] == ["row-not-fed"] * len(ON_DEVICE)


OPS = ("copy_h2d", "copy_d2h", "record_event", "synchronize_event", "launch")


@pytest.mark.parametrize(
    ("machine", "family", "op"),
    [
        *[("host", family, op) for family in ("llama", "qwen35") for op in OPS],
        # Launches are in the graph there.
        *[("driver", "llama", op) for op in OPS if op != "launch"],
    ],
)
def test_a_fault_at_any_call_fails_what_is_behind_it_and_mixes_nothing(
    make: Make, family: str, op: str
) -> None:
    def steps(play: Play, count: int) -> None:
        for _ in range(count):
            play.step([0, 1, 2, 3])

    counting: list[FaultyDevice] = []

    def count(device: Any) -> Any:
        counting.append(FaultyDevice(device, []))
        return counting[-1]

    play = Play(make(family, wrap=count), ON_DEVICE, 2)
    steps(play, 3)
    first = counting[0].calls(op)
    steps(play, 3)
    calls = counting[0].calls(op) - first
    right = play.end()
    assert calls >= 3
    some = {1, 2, 3, calls // 2, calls - 1, calls} if family == "qwen35" else {1, calls}
    for nth in sorted(some):
        faults = [Fault(op, first + nth)]
        runner: Any = make(family, wrap=lambda device, faults=faults: FaultyDevice(device, faults))
        play = Play(runner, ON_DEVICE, 2)
        with pytest.raises(DeviceError) as caught:
            steps(play, 6)
            play.finish()
        assert caught.value.code == "injected"
        # What was in flight behind it fails by that name; what was before it is right.
        for _, flight in play.flights:
            with suppress(DeviceError):
                assert flight.finish() == right[len(play.answers)]
                play.answers.append(flight.finish())
        assert play.answers == right[: len(play.answers)]
        for seq in ON_DEVICE:
            runner.close_sequence(seq)
        again = Play(runner, ON_DEVICE, 2)
        steps(again, 6)
        assert again.end() == right, nth


@pytest.mark.parametrize("machine", ["driver"])
def test_a_graph_refused_while_a_step_is_in_flight_costs_no_step(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*faults: Fault) -> tuple[list[list[Any]], Any]:
        devices: list[FaultyDevice] = []

        def wrap(device: Any) -> Any:
            devices.append(FaultyDevice(device, faults))
            return devices[-1]

        play = Play(make(wrap=wrap), ON_DEVICE, 2)
        for _ in range(6):
            play.step(list(ON_DEVICE))
        return play.end(), devices[0]

    right, device = run()
    assert device.calls("replay") >= 3
    found, device = run(Fault("replay", 3))
    assert len(device.fired) == 1 and found == right
    told = [r.getMessage() for r in caplog.records if "without graphs" in r.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("machine", ["host"])
def test_steps_in_flight_when_the_runner_closes_end_by_name(make: Make) -> None:
    runner, play = warm(make, ON_DEVICE)
    play.step(list(ON_DEVICE))
    runner.close()
    for _, flight in play.flights:
        with pytest.raises(DeviceError) as caught:
            flight.finish()
        assert caught.value.code == "runner-closed"
