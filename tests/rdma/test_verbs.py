"""Without verbs: one clear line, and TCP. With them: `.ci/rdma`."""

from __future__ import annotations

import argparse
import errno
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rota.errors import DeviceError, RequestError, RotaError
from rota.rdma import devices, verbs
from rota.rdma.peercli import add_peer_parser, parse_adapters, run_peer

from .fabric import MIB, Fabric, FakeDevice

OPENERS: tuple[Callable[[devices.Choice], object], ...] = (
    lambda choice: verbs.open_client(MIB, choice),
    verbs.open_host,
)


@pytest.fixture
def without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "pyverbs":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)


@pytest.mark.usefixtures("without_pyverbs")
def test_no_pyverbs_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert verbs.open_client(1 << 20) is None
        assert verbs.open_host() is None
    assert [record.name for record in caplog.records] == ["rota.rdma.verbs"] * 2
    for record in caplog.records:
        assert "TCP" in record.getMessage() and "python3-pyverbs" in record.getMessage()


def test_devices_by_list() -> None:
    assert devices.parse_devices("rxe0") == [("rxe0", None)]
    assert devices.parse_devices("mlx5_0:3, mlx5_1") == [("mlx5_0", 3), ("mlx5_1", None)]
    nine = ",".join(f"d{i}" for i in range(9))
    for wrong in ("", "a,", ":1", "a:", "a:x", "a:256", "a:-1", "a,a:1", nine):
        with pytest.raises(RequestError) as caught:
            devices.parse_devices(wrong)
        assert caught.value.code == "bad-verbs-devices"


@pytest.mark.parametrize("make", OPENERS)
def test_devices_are_closed_when_one_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[devices.Choice], object]
) -> None:
    fabric, opened = Fabric(), list[FakeDevice]()

    def device(name: str | None, gid_index: int | None) -> FakeDevice:
        if name == "absent":
            raise DeviceError("no such device", code="no-verbs-device")
        opened.append(FakeDevice(fabric))
        return opened[-1]

    monkeypatch.setattr(verbs, "Device", device)
    with pytest.raises(DeviceError) as missing:
        make([("a", None), ("b", 3), ("absent", None)])
    assert missing.value.code == "no-verbs-device"
    assert len(opened) == 2 and all(one.closed for one in opened)
    with pytest.raises(RequestError) as caught:
        make([(f"d{i}", None) for i in range(9)])
    assert caught.value.code == "bad-verbs-devices"
    assert len(opened) == 11 and all(one.closed for one in opened)


@pytest.mark.usefixtures("without_pyverbs")
@pytest.mark.parametrize(
    "open_", [verbs.Device, *(lambda name, make=make: make([(name, None)]) for make in OPENERS)]
)
def test_a_named_error_for_who_insists(open_: Callable[[str], object]) -> None:
    with pytest.raises(DeviceError) as caught:
        open_("rxe0")
    assert caught.value.code == "verbs-unavailable"


@pytest.mark.usefixtures("without_pyverbs")
def test_no_device_named_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is found: without a name that is TCP, by whatever error it shows."""

    def device(name: str | None, gid_index: int | None) -> FakeDevice:
        raise DeviceError("none", code="no-verbs-device")

    monkeypatch.setattr(verbs, "Device", device)
    assert [make(devices.ANY) for make in OPENERS] == [None, None]


def test_a_device_here() -> None:
    """Skipped, with the reason, where there is none."""
    try:
        device = verbs.Device()
    except DeviceError as error:
        pytest.skip(f"no verbs device here ({error.code}): {error.found}")
    assert device.depth >= 1 and len(device.gid) == 16
    device.close()


def test_adapters_of_the_command_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = tmp_path / "a", tmp_path / "b"
    assert parse_adapters([str(a), f"sql={b}"]) == {"a": a, "sql": b}
    for arguments, code in (
        ([str(a), f"a={b}"], "duplicate-adapter-id"),
        ([str(tmp_path / "c")], "not-a-directory"),
        ([f"{'x' * 256}={a}"], "bad-adapter-id"),
        ([f"={a}"], "bad-adapter-id"),
    ):
        with pytest.raises(RequestError) as caught:
            parse_adapters(arguments)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("text", "code"),
    [("short\n", "weak-secret"), (15 * "s", "weak-secret"), (4097 * "s", "bad-secret-file")],
)
def test_the_command_refuses_a_wrong_secret(tmp_path: Path, text: str, code: str) -> None:
    parser = argparse.ArgumentParser()
    add_peer_parser(parser.add_subparsers(dest="command"))
    secret = tmp_path / "secret"
    secret.write_text(text)
    args = parser.parse_args(["peer", str(tmp_path), "--secret-file", str(secret)])

    class Console:
        def print(self, *objects: Any) -> None:
            raise AssertionError("nothing is served")

    with pytest.raises(RotaError) as caught:
        run_peer(args, Console())
    assert caught.value.code == code


def test_the_command_serves_and_stops(kit: Any, tmp_path: Path) -> None:
    """The process that the lane uses, on TCP alone: one promotion, then SIGTERM."""
    import re
    import signal
    import subprocess

    from rota.gpu.lora.source import DirectorySource
    from rota.gpu.lora.stage import stage
    from rota.rdma.client import Peer

    folder = kit.write(tmp_path / "one", kit.small)
    script = kit.root / "tests/rdma_vm/peer_process.py"
    command = [sys.executable, str(script), str(folder), "--port", "0", "--no-rdma"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"peer at (\S+:\d+): 1 adapters by TCP\n", line)
            assert found is not None, line
            landed = stage(Peer(found.group(1), "one"), kit.small)
            disk = stage(DirectorySource(folder), kit.small)
            assert landed.image.buffer.tobytes() == disk.image.buffer.tobytes()
            process.send_signal(signal.SIGTERM)
            assert "peer stopped" in process.stdout.read()
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize(
    ("code", "takes"), [(errno.EOPNOTSUPP, False), (errno.EBADF, True), (0, False)]
)
def test_the_probe_for_device_memory(code: int, takes: bool) -> None:
    """What the driver answers to a descriptor that is none."""

    class Failed(Exception):
        error_code = code

    def register(*_: Any, dmabuf: int) -> Any:
        assert dmabuf == -1
        raise Failed("Failed to register a dma-buf MR")

    device = object.__new__(verbs.Device)
    device.pd = None
    device.lib = SimpleNamespace(  # type: ignore[assignment]  # a stand-in for the library
        mr=SimpleNamespace(DmaBufMR=register), enums=SimpleNamespace(IBV_ACCESS_LOCAL_WRITE=1)
    )
    assert device.takes_device_memory() is takes
