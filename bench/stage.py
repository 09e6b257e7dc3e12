"""Staging one adapter: disk, memory, a raw socket, a peer's files, a peer's packed image.

    python bench/stage.py [--mb 1 10 50 100 200] [--repeats 9]

One of less than 20 MB is repeated four times as often: its time is mostly how the system wakes two
processes.

Sizes are of the packed slot image (every pair present at the pool's full rank, BF16 files), so that
all ways move the same bytes. The peer runs in a process of its own; the raw socket is that process
sending the same number of bytes from the same kind of memory into the same kind. Raw socket and
packed image come both ways: over a connection made for each transfer, and over one that is kept.
With a secret, a new connection proves it first, and the hash is one that nobody can forge. The ways
take turns, each round in another order; medians; page cache warm. Each end of a raw socket and of a
packed image has a core of its own, as on two hosts: where a system puts both on one, that decides
the time. A raw socket checks nothing: "digest alone" is what hashing the image costs one thread.

"Several" is the rate of many transfers over kept connections by two threads, as an engine with many
adapters has it, in MB of image a second.

The loop's longest stall is that of an event loop in this process while a worker thread stages,
median of nine stagings, with the engine's own settings (`rota.sched.prompt`, staging threads); of
it, "core ms" is what the loop's thread waited for a core (/proc/thread-self/schedstat), when
others want the same two. The first line of a size says how late the loop is with nothing staged.
Writes bench/results/stage.json.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import machine

from rota.gpu.lora.buffers import blank
from rota.gpu.lora.dims import ModelDims
from rota.gpu.lora.layout import SlotLayout
from rota.gpu.lora.report import LoadReport
from rota.gpu.lora.source import BytesSource, DirectorySource
from rota.gpu.lora.stage import stage
from rota.rdma.client import Peer
from rota.rdma.hashes import KNOWN, chunk_digests
from rota.rdma.peer import WeightPeer
from rota.rdma.pool import PeerPool
from rota.sched.prompt import prompt_switching, settle_process
from rota.sched.staging import staging_threads

RANK = 16
RAW, RAW_KEPT = "raw socket", "raw socket, kept"
PACKED, PACKED_KEPT = "peer, packed image", "peer, packed image, kept"
PACKED_SECRET = "peer, packed image, secret"
SECRET = b"known to both ends"
APART = (RAW, RAW_KEPT, PACKED, PACKED_KEPT, PACKED_SECRET)
SEVERAL_BYTES = 300e6
PIECE = 1 << 20


def layout_of(megabytes: float) -> SlotLayout:
    """A model whose slot at rank 16 has that many bytes, and less than a layer more."""
    hidden = 1024
    one = SlotLayout(ModelDims(1, hidden, hidden, 256, hidden, 4 * hidden, 256), RANK)
    layers = math.ceil(megabytes * 1e6 / one.slot_bytes)
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
        peer, secret = WeightPeer(folders), WeightPeer(folders, secret=SECRET)
        raw = socket.create_server(("127.0.0.1", 0))
        addresses = ["{}:{}".format(*one.listen()) for one in (peer, secret)]
        pipe.send((*addresses, raw.getsockname()))

        memory = np.ones(256 << 20, np.uint8)

        def send_raw(client: socket.socket) -> None:
            with client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while asked := client.recv(8, socket.MSG_WAITALL):
                    (size,) = struct.unpack("<Q", asked)
                    if not size:
                        # Wakes the thread that accepts, which then ends.
                        return raw.shutdown(socket.SHUT_RDWR)
                    for start in range(0, size, PIECE):
                        client.sendall(memory[start : min(start + PIECE, size)].data)

        def accept_raw() -> None:
            with ThreadPoolExecutor(64) as pool:  # a thread for each kept connection
                while True:
                    try:
                        client, _ = raw.accept()
                    except OSError:
                        return
                    pool.submit(send_raw, client)

        async with anyio.create_task_group() as group:
            group.start_soon(peer.serve)
            group.start_soon(secret.serve)
            await anyio.to_thread.run_sync(accept_raw)
            peer.stop()
            secret.stop()

    anyio.run(run)


class Raw:
    """Receives bytes into a buffer like a stage's, over a new connection or one kept for each
    thread."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._mine = threading.local()
        self._all: list[socket.socket] = []

    def _connect(self) -> socket.socket:
        made = socket.create_connection(self._address)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def new(self, size: int) -> None:
        """One transfer over its own connection."""
        with self._connect() as connection:
            self._take(connection, size)

    def kept(self, size: int) -> None:
        """One transfer over this thread's connection."""
        connection = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = self._connect()
            self._all.append(connection)
        self._take(connection, size)

    def close(self) -> None:
        """Hang up, and stop the sender."""
        for connection in self._all:
            connection.close()
        with self._connect() as connection:
            connection.sendall(bytes(8))

    @staticmethod
    def _take(connection: socket.socket, size: int) -> None:
        target = blank(size)
        view = target.data
        connection.sendall(struct.pack("<Q", size))
        place = 0
        while place < size:
            place += connection.recv_into(view[place : place + PIECE])


def keep_to(process: int, cores: set[int]) -> None:
    """All threads of a process, and those they start, run on these cores from now on."""
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), cores)


def taken(
    calls: dict[str, Callable[[], Any]], repeats: int, peer: int
) -> dict[str, list[tuple[float, Any]]]:
    """Milliseconds and result of each call, ``repeats`` times and once that is not counted, in
    turns, so that a slow moment of the machine hits all of them, each time in another order, so
    that what one leaves behind (caches, where threads were last) does too."""
    results: dict[str, list[tuple[float, Any]]] = {name: [] for name in calls}
    order, rng = list(calls.items()), random.Random(0)
    every = os.sched_getaffinity(0)
    ours = every - {max(every)} or every
    keep_to(peer, {max(every)})
    for round_ in range(repeats + 1):
        rng.shuffle(order)
        for name, call in order:
            os.sched_setaffinity(0, ours if name in APART else every)
            begin = time.perf_counter()
            result = call()
            ms = (time.perf_counter() - begin) * 1e3
            if round_:
                results[name].append((ms, getattr(result, "report", None)))
            del result
    os.sched_setaffinity(0, every)
    keep_to(peer, every)
    return results


def phases(reports: list[LoadReport]) -> dict[str, float]:
    """Median milliseconds per phase."""
    return {
        name: round(statistics.median(report.seconds[name] for report in reports) * 1e3, 3)
        for name in reports[0].seconds
    }


def waited_for_core() -> float:
    """Seconds this thread has waited for a core so far."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def longest_stall(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds an event loop was late at most while a worker thread ran ``call``, and how many
    of these its thread waited for a core."""
    worst = (0.0, 0.0)

    async def run() -> None:
        nonlocal worst
        threads = staging_threads(1)
        async with anyio.create_task_group() as group:

            async def work() -> None:
                await threads.run(call)
                group.cancel_scope.cancel()

            group.start_soon(work)
            while True:
                core, before = waited_for_core(), time.perf_counter()
                await anyio.sleep(0.001)  # how much later than this is what is measured
                late = time.perf_counter() - before - 0.001
                worst = max(worst, (late * 1e3, (waited_for_core() - core) * 1e3))

        threads.close()

    anyio.run(run)
    return worst


def stalls(call: Callable[[], Any]) -> dict[str, float]:
    """The median of nine, the core's part of that very one, and the worst."""
    found = sorted(longest_stall(call) for _ in range(9))
    (stall, core), (worst, _) = found[4], found[-1]
    return {
        "longest loop stall ms": round(stall, 3),
        "of it for a core ms": round(core, 3),
        "worst of nine ms": round(worst, 3),
    }


def several(call: Callable[[], Any], size: int) -> float:
    """MB/s of many calls of ``size`` bytes by two threads; the best of two."""
    count = max(6, min(400, round(SEVERAL_BYTES / size)))
    best = 0.0

    def once() -> None:
        call()  # an image that was kept would take new memory from the system each time

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            begin = time.perf_counter()
            for done in [pool.submit(once) for _ in range(count)]:
                done.result()
            best = max(best, count * size / 1e6 / (time.perf_counter() - begin))
    return best


def measure(
    name: str,
    layout: SlotLayout,
    folder: Path,
    addresses: list[str],
    raw: Raw,
    peer: int,
    repeats: int,
) -> dict[str, Any]:
    """One size, all ways. ``addresses``: of the peer without and the one with a secret; ``peer``:
    the process they run in."""
    address, secured = addresses
    size = layout.slot_bytes
    repeats *= 4 if size < 20e6 else 1
    files = (
        (folder / "adapter_model.safetensors").read_bytes(),
        (folder / "adapter_config.json").read_bytes(),
    )
    pool = PeerPool()
    sources: dict[str, Any] = {
        "disk": DirectorySource(folder),
        "memory": BytesSource(*files),
        "peer, files": Peer(address, name, packed="never"),
        PACKED: Peer(address, name, packed="always"),
        PACKED_KEPT: Peer(address, name, packed="always", pool=pool),
        PACKED_SECRET: Peer(secured, name, packed="always", secret=SECRET),
    }
    calls: dict[str, Callable[[], Any]] = {
        RAW: lambda: raw.new(size),
        RAW_KEPT: lambda: raw.kept(size),
    }
    calls |= {way: partial(stage, source, layout) for way, source in sources.items()}
    images = {way: calls[way]().image.buffer for way in sources}
    for way, image in images.items():
        assert np.array_equal(image, images["disk"]), f"{way} gave other bytes"
    image, hashed = images["disk"], []
    for _ in range(repeats):
        begin = time.perf_counter()
        chunk_digests(image, next(iter(KNOWN)))
        hashed.append((time.perf_counter() - begin) * 1e3)
    row: dict[str, Any] = {"slot_mb": round(size / 1e6, 2), "repeats": repeats}
    row["digest alone ms"] = round(statistics.median(hashed), 3)
    del images, image
    row["nothing staged"] = stalls(lambda: time.sleep(0.2))  # a thread that does nothing
    print(
        f"{size / 1e6:8.1f} MB  digest alone {row['digest alone ms']} ms  {row['nothing staged']}"
    )
    for way, got in taken(calls, repeats, peer).items():
        times = [ms for ms, _ in got]
        row[way] = {"ms": round(statistics.median(times), 3), "best ms": round(min(times), 3)}
        if way in sources:
            row[way] |= {"phases": phases([report for _, report in got])} | stalls(calls[way])
        print(f"{size / 1e6:8.1f} MB  {way:24}", row[way])
    rates = {way: several(calls[way], size) for way in (RAW_KEPT, PACKED_KEPT)}
    row["several, MB/s"] = {way: round(rate) for way, rate in rates.items()}
    row["packed / raw throughput"] = ratios = {
        "new connection": round(row[RAW]["ms"] / row[PACKED]["ms"], 3),
        "new connection, secret": round(row[RAW]["ms"] / row[PACKED_SECRET]["ms"], 3),
        "kept connection": round(row[RAW_KEPT]["ms"] / row[PACKED_KEPT]["ms"], 3),
        "kept, raw checked too": round(
            (row[RAW_KEPT]["ms"] + row["digest alone ms"]) / row[PACKED_KEPT]["ms"], 3
        ),
        "several": round(rates[PACKED_KEPT] / rates[RAW_KEPT], 3),
    }
    print(f"{size / 1e6:8.1f} MB  several {row['several, MB/s']}  packed / raw {ratios}")
    pool.close()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 10, 50, 100, 200])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work, prompt_switching():
        layouts = {f"{mb:g}": layout_of(mb) for mb in args.mb}
        folders = {name: write(Path(work) / name, one) for name, one in layouts.items()}
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=peer_process, args=(folders, theirs)
        )
        process.start()
        *addresses, raw_address = ours.recv()
        time.sleep(2.1)  # until then the peer takes the files for ones that may still change
        settle_process()
        raw = Raw(raw_address)
        for name, layout in layouts.items():
            assert process.pid is not None
            made = measure(name, layout, folders[name], addresses, raw, process.pid, args.repeats)
            rows.append(made)
        raw.close()
        process.join(30)
    out = HERE / "results" / "stage.json"
    out.parent.mkdir(exist_ok=True)
    record = {"machine": machine.describe(HERE.parent), "rows": rows}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {out.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
