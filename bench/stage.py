"""Staging one adapter: disk, memory, a raw socket, a peer's files, a peer's packed image.

    python bench/stage.py [--mb 1 10 50 100 200] [--repeats 9]

Sizes are of the packed slot image (every pair present at the pool's full rank, BF16 files), so that
all ways move the same bytes. The peer runs in a process of its own; the raw socket is that process
sending the same number of bytes from the same kind of memory. The ways take turns; medians; page
cache warm; wants two cores to itself (one receives and hashes, one sends). The loop's longest stall
is that of an event loop in this process while a worker thread stages (median of five stagings; the
first line says how late that loop is with nothing staged). Writes bench/results/stage.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import machine

from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.layout import SlotLayout
from rota.gpu.lora.report import LoadReport
from rota.gpu.lora.source import BytesSource, DirectorySource
from rota.gpu.lora.stage import stage
from rota.rdma.client import Peer
from rota.rdma.peer import WeightPeer

RANK = 16
RAW = "raw socket"


def layout_of(megabytes: float) -> SlotLayout:
    """A model whose slot at rank 16 has about that many bytes."""
    hidden = 1024
    one = SlotLayout(ModelDims(1, hidden, hidden, 256, hidden, 4 * hidden, 256), RANK)
    layers = max(1, round(megabytes * 1e6 / one.slot_bytes))
    return SlotLayout(ModelDims(layers, hidden, hidden, 256, hidden, 4 * hidden, 256), RANK)


def write(folder: Path, layout: SlotLayout) -> Path:
    """A BF16 adapter with every pair of the layout."""
    rng = np.random.default_rng(0)
    header: dict[str, Any] = {}
    place = 0
    folder.mkdir()
    blobs = []
    for pair in layout.pairs:
        for half, shape in (("A", (RANK, pair.k_in)), ("B", (pair.n_out, RANK))):
            values = rng.standard_normal(shape, np.float32)
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            key = (
                f"base_model.model.model.layers.{pair.layer}.{pair.module.parent}"
                f".{pair.module.leaf}.lora_{half}.weight"
            )
            offsets = [place, place + len(raw)]
            header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
            blobs.append(raw)
            place += len(raw)
    text = json.dumps(header).encode()
    file = struct.pack("<Q", len(text)) + text + b"".join(blobs)
    (folder / "adapter_model.safetensors").write_bytes(file)
    targets = [module.leaf for module in layout.dims.modules]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "use_rslora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
    return folder


def peer_process(folders: dict[str, Path], pipe: Any) -> None:
    """A peer, and beside it a socket that only sends."""

    async def run() -> None:
        peer = WeightPeer(folders)
        raw = socket.create_server(("127.0.0.1", 0))
        host, port = peer.listen()
        pipe.send((f"{host}:{port}", raw.getsockname()))

        def send_raw() -> None:
            memory = np.ones(256 << 20, np.uint8)
            while True:
                client, _ = raw.accept()
                with client:
                    (size,) = struct.unpack("<Q", client.recv(8, socket.MSG_WAITALL))
                    if not size:
                        return
                    client.sendall(memory[:size].data)

        async with anyio.create_task_group() as group:
            group.start_soon(peer.serve)
            await anyio.to_thread.run_sync(send_raw)
            peer.stop()

    anyio.run(run)


def raw_socket(address: tuple[str, int], size: int) -> None:
    """Receive ``size`` bytes into fresh memory."""
    target = np.empty(size, np.uint8)
    view = target.data
    with socket.create_connection(address) as connection:
        connection.sendall(struct.pack("<Q", size))
        place = 0
        while place < size:
            place += connection.recv_into(view[place : place + (1 << 20)])


def taken(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[tuple[float, Any]]]:
    """Milliseconds and result of each call, ``repeats`` times and once that is not counted, in
    turns, so that a slow moment of the machine hits all of them."""
    results: dict[str, list[tuple[float, Any]]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            result = call()
            ms = (time.perf_counter() - begin) * 1e3
            if round_:
                results[name].append((ms, getattr(result, "report", None)))
            del result
    return results


def phases(reports: list[LoadReport]) -> dict[str, float]:
    """Median milliseconds per phase."""
    return {
        name: round(statistics.median(report.seconds[name] for report in reports) * 1e3, 3)
        for name in reports[0].seconds
    }


def longest_stall(call: Callable[[], Any]) -> float:
    """Milliseconds an event loop was late at most while a worker thread ran ``call``."""
    worst = 0.0

    async def run() -> None:
        nonlocal worst
        async with anyio.create_task_group() as group:

            async def work() -> None:
                await anyio.to_thread.run_sync(call)
                group.cancel_scope.cancel()

            group.start_soon(work)
            while True:
                before = time.perf_counter()
                await anyio.sleep(0.001)
                worst = max(worst, time.perf_counter() - before - 0.001)

    anyio.run(run)
    return worst * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 10, 50, 100, 200])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        layouts = {f"{mb:g}": layout_of(mb) for mb in args.mb}
        folders = {name: write(Path(work) / name, one) for name, one in layouts.items()}
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=peer_process, args=(folders, theirs)
        )
        process.start()
        address, raw_address = ours.recv()
        for name, layout in layouts.items():
            folder, size = folders[name], layout.slot_bytes
            files = (
                (folder / "adapter_model.safetensors").read_bytes(),
                (folder / "adapter_config.json").read_bytes(),
            )
            sources: dict[str, Any] = {
                "disk": DirectorySource(folder),
                "memory": BytesSource(*files),
                "peer, files": Peer(address, name, packed="never"),
                "peer, packed image": Peer(address, name, packed="always"),
            }
            calls: dict[str, Callable[[], Any]] = {RAW: lambda n=size: raw_socket(raw_address, n)}
            for way, source in sources.items():
                calls[way] = lambda s=source, y=layout: stage(s, y)
            images = {way: calls[way]().image.buffer for way in sources}
            for way, image in images.items():
                assert np.array_equal(image, images["disk"]), f"{way} gave other bytes"
            del images
            row: dict[str, Any] = {"slot_mb": round(size / 1e6, 2), "repeats": args.repeats}
            row["loop late without staging ms"] = longest_stall(lambda: time.sleep(0.2))
            for way, got in taken(calls, args.repeats).items():
                times = [ms for ms, _ in got]
                row[way] = {"ms": statistics.median(times), "best ms": min(times)}
                text = f"{size / 1e6:8.1f} MB  {way:20} {row[way]['ms']:9.2f} ms"
                if way != RAW:
                    stall = statistics.median(longest_stall(calls[way]) for _ in range(5))
                    row[way] |= {"phases": phases([report for _, report in got])}
                    row[way] |= {"longest loop stall ms": stall}
                    text += f"  loop stall {stall:6.2f} ms  {row[way]['phases']}"
                print(text)
            packed = row["peer, packed image"]
            row["packed / raw throughput"] = row[RAW]["ms"] / packed["ms"]
            row["packed / raw throughput, best"] = row[RAW]["best ms"] / packed["best ms"]
            print(f"             packed / raw throughput: {row['packed / raw throughput']:.2f}")
            rows.append(row)
        with socket.create_connection(raw_address) as connection:
            connection.sendall(bytes(8))
        process.join(30)
    out = HERE / "results" / "stage.json"
    out.parent.mkdir(exist_ok=True)
    record = {"machine": machine.describe(HERE.parent), "rows": rows}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {out.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
