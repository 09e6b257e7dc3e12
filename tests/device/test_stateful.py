"""A random walk over a device, compared with a model that keeps each allocation as a list of bytes.

The model runs work at once; a checked device runs it late. Whatever is read through the protocol,
every refusal and every account must agree.
"""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rota.errors import DeviceError
from rota.gpu.device import KernelSpec
from rota.gpu.host import HostDevice
from rota.gpu.host_memory import FRESH_BYTE

ONE = (1, 1, 1)
LIMIT = 1 << 16


def fill(addr, n, value):
    ctypes.memset(addr, value, n)


FILL = KernelSpec(
    "fill",
    "pii",
    host=fill,
    cuda_source="""
extern "C" __global__ void fill(unsigned char* p, int n, int value) {
    for (int i = 0; i < n; ++i) p[i] = (unsigned char)value;
}
""",
    footprint=lambda a: [(int(a[0]), int(a[1]), "w")],
)


class Model:
    """One allocation as it must be; a cell is ``None`` where a serving device promises nothing."""

    def __init__(self, addr, size, label, fresh=None):
        self.addr = addr
        self.cells = [fresh] * size
        self.label = label
        self.live = True


class DeviceMachine(RuleBasedStateMachine):
    """Both modes of the host device share these rules; subclasses choose."""

    checked: bool
    fresh = None  # what a fresh byte of a device that fills its allocations is
    blocks = Bundle("blocks")
    execs = Bundle("execs")

    def make(self):
        return HostDevice(checked=self.checked, memory_limit=LIMIT)

    @initialize()
    def open(self):
        self.device = self.make()
        self.stream = self.device.create_stream(label="s")
        self.kernel = self.device.load_kernel(FILL)
        self.live = []
        self.held = 0
        self.recording = None  # closures over the model, replayed in order, or None
        self.touched = []
        self.broken = False
        self.count = 0
        self.exec_count = 0

    def expect(self, code, call):
        try:
            call()
        except DeviceError as error:
            assert error.code == code, error
            return error
        raise AssertionError(f"expected {code}")

    def do(self, call, effect, *models):
        """Ask for stream work; apply it to the model now, or keep it with the capture."""
        if self.broken:
            self.expect("capture-invalidated", call)
            return
        call()
        if self.recording is None:
            effect()
        else:
            self.recording.append(effect)
            self.touched += models

    @rule(target=blocks, size=st.integers(1, 4000))
    def alloc(self, size):
        self.count += 1
        label = f"n{self.count}"
        rounded = -(-size // 256) * 256
        if self.recording is not None:
            self.expect("capture-violation", lambda: self.device.alloc(size, label=label))
            self.broken = True
        elif self.held + rounded > LIMIT:
            error = self.expect("out-of-memory", lambda: self.device.alloc(size, label=label))
            assert error.subject == label
        else:
            model = Model(self.device.alloc(size, label=label), size, label, self.fresh)
            self.held += rounded
            self.live.append(model)
            return model
        dead = Model(0, size, label)
        dead.live = False
        return dead

    @rule(model=blocks)
    def free(self, model):
        if model.addr == 0:
            return
        if self.recording is not None:
            self.expect("capture-violation", lambda: self.device.free(model.addr))
            self.broken = True
        elif model.live:
            self.device.synchronize(self.stream)
            self.device.free(model.addr)
            model.live = False
            self.live.remove(model)
            self.held -= -(-len(model.cells) // 256) * 256
        elif self.checked or all(other.addr != model.addr for other in self.live):
            error = self.expect("double-free", lambda: self.device.free(model.addr))
            if self.checked:
                assert error.subject == model.label

    @rule(model=blocks, at=st.integers(0, 4200), n=st.integers(0, 4200), value=st.integers(0, 255))
    def memset(self, model, at, n, value):
        def call():
            self.device.memset(model.addr + at, value, n, self.stream)

        def effect():
            model.cells[at : at + n] = [value] * n

        if model.live and at + n <= len(model.cells):
            self.do(call, effect, model)
        elif model.live and at < len(model.cells):
            code = "capture-invalidated" if self.broken else "out-of-bounds"
            self.expect(code, call)
        elif not model.live and self.checked and 0 < model.addr and at < len(model.cells):
            self.expect("capture-invalidated" if self.broken else "use-after-free", call)

    @rule(source=blocks, dest=blocks, n=st.integers(1, 500))
    def copy(self, source, dest, n):
        if not (source.live and dest.live) or source is dest:
            return
        n = min(n, len(source.cells), len(dest.cells))

        def effect():
            dest.cells[:n] = source.cells[:n]

        self.do(
            lambda: self.device.copy_d2d(dest.addr, source.addr, n, self.stream),
            effect,
            source,
            dest,
        )

    @rule(model=blocks, n=st.integers(1, 300), value=st.integers(0, 255))
    def launch(self, model, n, value):
        if not model.live:
            return
        n = min(n, len(model.cells))

        def effect():
            model.cells[:n] = [value] * n

        args = (model.addr, n, value)
        self.do(lambda: self.device.launch(self.kernel, ONE, ONE, args, self.stream), effect, model)

    @rule()
    def begin(self):
        if self.recording is not None:
            self.expect("capture-violation", lambda: self.device.begin_capture(self.stream))
            return
        self.device.begin_capture(self.stream)
        self.recording, self.touched = [], []

    @precondition(lambda self: self.recording is not None)
    @rule(target=execs)
    def end(self):
        effects, models = self.recording, self.touched
        self.recording, self.touched = None, []
        if self.broken:
            self.broken = False
            self.expect("capture-invalidated", lambda: self.device.end_capture(self.stream))
            return (None, [], [])
        graph = self.device.end_capture(self.stream)
        graph_exec = self.device.instantiate(graph)
        self.device.destroy_graph(graph)
        self.exec_count += 1
        return (graph_exec, effects, models)

    @precondition(lambda self: self.recording is not None)
    @rule()
    def abort(self):
        assert self.device.abort_capture_if_active(self.stream)
        self.recording, self.touched, self.broken = None, [], False

    @rule(captured=execs)
    def replay(self, captured):
        graph_exec, effects, models = captured
        if graph_exec is None:
            return

        def call():
            self.device.replay(graph_exec, self.stream)

        if self.recording is not None:
            self.expect("capture-violation", call)
            self.broken = True
        elif all(model.live for model in models):
            call()
            for effect in effects:
                effect()
        else:
            error = self.expect("use-after-free", call)
            assert error.subject in {model.label for model in models if not model.live}

    @rule(captured=consumes(execs))
    def destroy(self, captured):
        if captured[0] is not None:
            self.device.destroy_exec(captured[0])
            self.exec_count -= 1
            self.expect("destroyed-handle", lambda: self.device.replay(captured[0], self.stream))

    @precondition(lambda self: self.recording is None)
    @rule(model=blocks)
    def read(self, model):
        if not model.live:
            return
        size = len(model.cells)
        held = ctypes.create_string_buffer(size)
        self.device.copy_d2h(ctypes.addressof(held), model.addr, size, self.stream)
        for cell, byte in zip(model.cells, held.raw, strict=True):
            assert cell is None or cell == byte

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "device"):
            return
        assert self.device.memory_info() == (LIMIT - self.held, LIMIT)
        labels = self.device.live_labels()
        assert len(labels) == len(self.live) + 1 + self.exec_count
        assert [model.label for model in self.live] == list(labels[: len(self.live)])

    def teardown(self):
        if not hasattr(self, "device"):
            return
        leaked = ", ".join(self.device.live_labels())  # the stream at least
        if self.checked:
            assert self.expect("leak", self.device.close).subject == leaked
        else:
            self.device.close()
        assert self.device.live_labels() == ()


class CheckedMachine(DeviceMachine):
    checked = True
    fresh = FRESH_BYTE


class ServingMachine(DeviceMachine):
    checked = False


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestChecked = CheckedMachine.TestCase
TestChecked.settings = SETTINGS
TestServing = ServingMachine.TestCase
TestServing.settings = SETTINGS


@pytest.mark.parametrize("is_checked", [True, False])
def test_cuda(cuda_machine, is_checked):
    if cuda_machine.fake is not None:
        cuda_machine.fake.reset()

    class CudaMachine(DeviceMachine):
        checked = is_checked

        def make(self):
            return cuda_machine.open(checked=is_checked, memory_limit=LIMIT)

    run_state_machine_as_test(CudaMachine, settings=settings(SETTINGS, max_examples=20))
    if cuda_machine.fake is not None:
        assert cuda_machine.fake.driver.live() == {}
