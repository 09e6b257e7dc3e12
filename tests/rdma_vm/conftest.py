"""Real verbs: pairs of devices joined by a cable, a peer in a process of its own, adapters to land.

The tests run in the guest of ``.ci/rdma``; elsewhere each is skipped with the reason.
"""

from __future__ import annotations

import functools
import gc
import json
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rota.errors import DeviceError
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.layout import SlotLayout
from rota.gpu.lora.source import DirectorySource
from rota.gpu.lora.stage import StagedAdapter, stage
from rota.rdma.client import Peer
from rota.rdma.hosts import VerbsClient
from rota.rdma.verbs import Device

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECRET = b"a secret of the lane"
#: 2 layers of hidden 768: about 17 MB a slot at rank 64, so that a transfer can be interrupted.
LARGE = SlotLayout(ModelDims(2, 768, 768, 768, 768, 6144, 256), 256)
ARENA = 96 << 20


def no_verbs() -> str | None:
    """Why there are not two pairs of verbs devices here, or ``None``."""
    try:
        for name in ("rxe0", "rxe1", "rxe2", "rxe3"):
            Device(name).close()
    except DeviceError as error:
        return f"real verbs run in the guest of .ci/rdma; here: {error.message}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if mine and (reason := no_verbs()) is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))


def write_adapter(folder: Path, layout: SlotLayout, rank: int, seed: int, dtype: str) -> Path:
    """An adapter with every pair of ``layout``."""
    rng = np.random.default_rng(seed)
    header: dict[str, Any] = {}
    blobs: list[bytes] = []
    place = 0
    for pair in layout.pairs:
        for half, shape in (("A", (rank, pair.k_in)), ("B", (pair.n_out, rank))):
            values = rng.standard_normal(shape, np.float32)
            raw = values.tobytes()
            if dtype == "BF16":
                raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            key = (
                f"base_model.model.model.layers.{pair.layer}.{pair.module.parent}"
                f".{pair.module.leaf}.lora_{half}.weight"
            )
            offsets = [place, place + len(raw)]
            header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
            blobs.append(raw)
            place += len(raw)
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(blobs)
    )
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "use_rslora": False,
        "target_modules": [module.leaf for module in layout.dims.modules],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class PeerProcess:
    """``rota peer`` in a process of its own, on rxe1 unless it is told."""

    def __init__(
        self,
        folders: dict[str, Path],
        secret: Path | None,
        *more: str,
        devices: str = "rxe1",
        prefix: tuple[str, ...] = (),
    ) -> None:
        names = [f"{name}={path}" for name, path in folders.items()]
        arguments = [*names, "--port", "0", "--rdma-device", devices, *more]
        if secret is not None:
            arguments += ["--secret-file", str(secret)]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "peer_process.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        found = re.search(r"peer at (\S+:\d+):", self.first_line)
        assert found is not None, self.first_line
        self.address = found.group(1)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> str:
        """Stop gracefully; what it printed last."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return rest


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters by id."""
    root = tmp_path_factory.mktemp("adapters")
    made = {
        "large": write_adapter(root / "large", LARGE, 200, 1, "BF16"),
        "large-f32": write_adapter(root / "large-f32", LARGE, 24, 2, "F32"),
        "changing": write_adapter(root / "changing", LARGE, 40, 3, "BF16"),
    }
    for family in ("llama", "qwen35"):
        for path in sorted((ROOT / f"tests/data/oracle/{family}/adapters").iterdir()):
            made[f"{family}-{path.name}"] = path
    return made


@pytest.fixture(scope="session")
def on_disk(folders: dict[str, Path]) -> Callable[[str], StagedAdapter]:
    """What staging an adapter from disk for `LARGE` gives; done once each."""

    @functools.cache
    def staged(name: str) -> StagedAdapter:
        return stage(DirectorySource(folders[name]), LARGE)

    return staged


@pytest.fixture(scope="session")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(SECRET + b"\n")
    return path


@pytest.fixture(scope="session")
def peer(folders: dict[str, Path], secret: Path) -> Iterator[PeerProcess]:
    """One peer for the tests that leave it alive."""
    made = PeerProcess(folders, secret)
    yield made
    made.stop()


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("rxe0")


@pytest.fixture(scope="session")
def transport(device: Device) -> Iterator[VerbsClient]:
    """One registration for the whole session."""
    made = VerbsClient([device], ARENA)
    yield made
    gc.collect()  # a caught error and its frames are a cycle, and may hold a block
    made.close()


@pytest.fixture(scope="session")
def narrow() -> Iterator[VerbsClient]:
    """A client with one READ in flight: whatever a test does once something has landed happens
    while most of the image is still to be asked for."""
    device = Device("rxe0")
    device.depth = 1
    made = VerbsClient([device], ARENA)
    yield made
    gc.collect()
    made.close()


@pytest.fixture
def source(peer: PeerProcess, transport: VerbsClient) -> Callable[..., Peer]:
    def make(adapter: str, **more: Any) -> Peer:
        address = more.pop("address", peer.address)
        fields: dict[str, Any] = {"secret": SECRET, "transport": transport, "packed": "always"}
        return Peer(address, adapter, **(fields | more))

    return make
