"""Checking chunks: on the caller's thread while nothing arrives, else beside it."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

from rota.errors import StagingError
from rota.rdma.hashes import KNOWN, Hash, chunk_digests
from rota.rdma.messages import CHUNK_BYTES
from rota.rdma.verify import ChunkVerifier


def threads() -> int:
    return sum("rota-verify" in t.name for t in threading.enumerate())


def image(nbytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def verifier(array: np.ndarray, bad: int | None = None, name: str = "sha256") -> ChunkVerifier:
    digests = bytearray(chunk_digests(array, name))
    if bad is not None:
        digests[KNOWN[name].digest_bytes * (bad + 1) - 1] ^= 1
    return ChunkVerifier(array, bytes(digests), KNOWN[name])


@pytest.mark.parametrize("nbytes", [1, CHUNK_BYTES, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
@pytest.mark.parametrize("step", [1 << 18, CHUNK_BYTES, 1 << 30])
@pytest.mark.parametrize("name", KNOWN)
def test_all_of_it_is_checked(nbytes: int, step: int, name: str) -> None:
    array = image(nbytes)
    for bad in (None, *range(-(-nbytes // CHUNK_BYTES))):
        subject = verifier(array, bad, name)
        try:
            with pytest.raises(StagingError) if bad is not None else nullcontext() as caught:
                for there in range(step, nbytes, step):
                    subject.advance(there)
                subject.finish()
            if caught is None:
                continue
            assert (caught.value.code, caught.value.subject) == ("digest-mismatch", f"chunk {bad}")
        finally:
            subject.close()


class Gate:
    """A hash that threads may not finish before it is opened; the caller's is not held up."""

    def __init__(self) -> None:
        self.open, self.caller = threading.Event(), threading.current_thread()
        self.by_caller = 0

    def __call__(self, data: np.ndarray) -> bytes:
        if threading.current_thread() is self.caller:
            self.by_caller += 1
        else:
            assert self.open.wait(30)
        return KNOWN["sha256"].of(data)


def test_the_caller_helps_when_threads_are_behind() -> None:
    array, gate = image(5 * CHUNK_BYTES), Gate()
    subject = ChunkVerifier(array, chunk_digests(array, "sha256"), Hash(gate), threads=1)
    subject.advance(CHUNK_BYTES - 1)
    assert not subject.help() and threads() == 0  # nothing is whole yet
    subject.advance(4 * CHUNK_BYTES)
    assert threads() == 1
    while subject.help():
        pass
    assert 2 <= gate.by_caller <= 3  # one waits, and the thread may have taken one
    gate.open.set()
    subject.finish()
    assert gate.by_caller <= 5
    subject.close()
    subject.close()
    assert threads() == 0


def test_an_image_of_one_chunk_needs_no_thread() -> None:
    array = image(CHUNK_BYTES)
    subject = verifier(array)
    subject.advance(CHUNK_BYTES)
    subject.finish()
    assert threads() == 0
    subject.close()


def test_wrong_bytes_are_told_while_others_arrive() -> None:
    array = image(3 * CHUNK_BYTES)
    subject = verifier(array, bad=0)
    subject.advance(CHUNK_BYTES)
    with pytest.raises(StagingError):
        for there in range(CHUNK_BYTES, 1 << 40):  # the thread will have told it soon
            subject.advance(min(there, 2 * CHUNK_BYTES))
    subject.close()


def test_without_threads_the_caller_checks_all_when_he_may() -> None:
    array, gate = image(3 * CHUNK_BYTES), Gate()
    subject = ChunkVerifier(array, chunk_digests(array, "sha256"), Hash(gate), threads=0)
    subject.advance(CHUNK_BYTES - 1)
    assert not subject.help()
    subject.advance(2 * CHUNK_BYTES)
    assert subject.help() and gate.by_caller == 1
    assert subject.help() and not subject.help()
    subject.finish()
    assert (gate.by_caller, threads()) == (3, 0)


@pytest.mark.parametrize("name", KNOWN)
def test_who_hashes_gives_up_the_interpreter(name: str) -> None:
    """Nobody is made to wait for a chunk's digest: the loop least of all."""
    data, go, ran = image(CHUNK_BYTES), threading.Lock(), list[bool]()
    go.acquire()

    def other() -> None:
        with go:
            ran.append(True)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(1000)  # now the interpreter goes to those alone to whom it is given up
    try:
        go.release()
        tries = 0
        while not ran and tries < 3000:
            KNOWN[name].of(data)
            tries += 1
        assert ran
    finally:
        sys.setswitchinterval(before)
        thread.join(30)


@pytest.mark.parametrize("bad", [None, 1])
def test_a_quick_hash_is_taken_at_once_by_who_receives(bad: int | None) -> None:
    """Each chunk while it is in the caches: no thread, and nothing left for later."""
    array, seen = image(4 * CHUNK_BYTES), list[tuple[int, int]]()
    digests = bytearray(chunk_digests(array, "sha256"))
    if bad is not None:
        digests[32 * bad] ^= 1

    def hashed(data: np.ndarray) -> bytes:
        seen.append((threading.get_ident(), data.nbytes))
        return KNOWN["sha256"].of(data)

    subject = ChunkVerifier(array, bytes(digests), Hash(hashed, quick=True))
    me = (threading.get_ident(), CHUNK_BYTES)
    subject.advance(CHUNK_BYTES + 5)
    assert (seen, subject.help()) == ([me], False)
    with pytest.raises(StagingError) if bad is not None else nullcontext():
        subject.advance(2 * CHUNK_BYTES)
        assert seen == 2 * [me]
        subject.finish()
    assert seen == (2 if bad else 4) * [me] and threads() == 0
    subject.close()


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_thread_shares_what_is_left_in_the_end(bad: int | None) -> None:
    """Two of the chunks are checked at the same time, or this would not go on."""
    array, both, seen = image(5 * CHUNK_BYTES), threading.Barrier(2), []
    digests = bytearray(chunk_digests(array, "sha256"))
    if bad is not None:
        digests[32 * bad] ^= 1

    def hashed(data: np.ndarray) -> bytes:
        seen.append(threading.get_ident())
        if len(seen) <= 2:
            both.wait(30)
        return KNOWN["sha256"].of(data)

    subject = ChunkVerifier(array, bytes(digests), Hash(hashed), threads=0)
    subject.advance(5 * CHUNK_BYTES - 1)
    assert not seen and threads() == 0
    with pytest.raises(StagingError) if bad is not None else nullcontext():
        subject.finish()
    subject.close()
    assert len(set(seen[:2])) == 2 and threads() == 0
    assert bad is not None or len(seen) == 5


def test_a_lent_thread_checks_them_and_stays() -> None:
    array, gate = image(4 * CHUNK_BYTES), Gate()
    with ThreadPoolExecutor(1, "rota-verify") as lent:
        for bad in (None, 1):
            digests = bytearray(chunk_digests(array, "sha256"))
            if bad is not None:
                digests[32 * bad] ^= 1
            subject = ChunkVerifier(array, bytes(digests), Hash(gate), 1, lent)
            gate.open.set()
            with pytest.raises(StagingError) if bad is not None else nullcontext():
                subject.advance(2 * CHUNK_BYTES)
                subject.finish()
            subject.close()
            assert lent.submit(int).result() == 0
            assert threads() == 1


def test_nothing_looks_at_the_array_once_it_is_closed() -> None:
    """A thread that outlives the verifier has let go of what was being checked, and asks for no
    more of it."""
    array, gate, seen = image(4 * CHUNK_BYTES), Gate(), []

    def hashed(data: np.ndarray) -> bytes:
        seen.append(data.nbytes)
        return gate(data)

    with ThreadPoolExecutor(1, "rota-verify") as lent:
        lent.submit(gate.open.wait, 30)  # the thread is busy
        subject = ChunkVerifier(array, bytes(4 * 32), Hash(hashed), 1, lent)
        subject.advance(2 * CHUNK_BYTES)
        subject.close()
        gate.open.set()
        assert lent.submit(int).result() == 0
        assert not seen
