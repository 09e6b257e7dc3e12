"""One queue pair on an open verbs device: posting READs and learning how they end.

pyverbs never releases the GIL inside a verb, so nothing here blocks in one: a completion is awaited
by the channel's descriptor, and polling the queue returns at once. `SGE` and `SendWR` are closed
exactly once, right after posting.

What it owns: the queue pair, its completion queue and channel. Invariant: after `fail` all that was
posted completes, flushed, so that who drains it knows when its targets are written no more.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from typing import TYPE_CHECKING, Any, Final

from . import messages as m

if TYPE_CHECKING:
    from .verbs import Device

PORT: Final = 1
MAX_DEPTH: Final = 16
_CHANNEL_LINK: Final = "anon_inode:[infinibandevent]"


def _channels() -> set[int]:
    """Descriptors of this process that are completion channels."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _CHANNEL_LINK:
                found.add(int(name))
        except OSError:
            continue
    return found


class QueuePair:
    """One reliable connection. ``channel``: completions wake `wait` (the reading end)."""

    def __init__(self, device: Device, *, channel: bool) -> None:
        self._device, lib = device, device.lib
        self.psn = secrets.randbits(24)
        self.descriptor = -1
        self._channel: Any = None
        self._cq: Any = None
        self._qp: Any = None
        size = 2 * device.depth
        try:
            if channel:
                with device._lock:  # the new descriptor is found by comparing before and after
                    before = _channels()
                    self._channel = lib.cq.CompChannel(device.context)
                    fd = getattr(self._channel, "fd", None)
                    self.descriptor = fd if fd is not None else (_channels() - before).pop()
                os.set_blocking(self.descriptor, False)
            self._cq = lib.cq.CQ(device.context, size, None, self._channel, 0)
            cap = lib.qp.QPCap(
                max_send_wr=size, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=0
            )
            init = lib.qp.QPInitAttr(
                qp_type=lib.enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0
            )
            self._qp = lib.qp.QP(device.pd, init)
        except Exception as error:  # pyverbs raises what it likes
            self.close()
            raise device.failed("making a queue pair", error) from error
        self.depth = device.depth

    @property
    def rail(self) -> m.Rail:
        """This end, as it is told to the other."""
        device = self._device
        return m.Rail(int(self._qp.qp_num), self.psn, device.gid, device.mtu, device.depth, 0)

    def connect(self, other: m.Rail) -> None:
        """INIT, RTR, RTS against the other end. Raises DeviceError verbs-failed."""
        lib, device = self._device.lib, self._device
        try:
            made = lib.qp.QPAttr(port_num=PORT)
            made.pkey_index = 0
            made.qp_access_flags = (
                lib.enums.IBV_ACCESS_LOCAL_WRITE | lib.enums.IBV_ACCESS_REMOTE_READ
            )
            self._qp.to_init(made)
            gid = lib.addr.GID(str(ipaddress.IPv6Address(other.gid).exploded))
            route = lib.addr.GlobalRoute(dgid=gid, sgid_index=device.gid_index, hop_limit=64)
            made.ah_attr = lib.addr.AHAttr(port_num=PORT, is_global=1, gr=route, dlid=0, sl=0)
            made.path_mtu = min(device.mtu, other.mtu)
            made.dest_qp_num = other.qpn
            made.rq_psn = other.psn
            made.max_dest_rd_atomic = device.depth
            made.min_rnr_timer = 12
            self._qp.to_rtr(made)
            # 4.096 us * 2**16 = 268 ms a try, 6 tries: a busy peer is given time, a dead one is
            # known within a few seconds. The reader keeps a deadline of its own in any case.
            made.timeout, made.retry_cnt, made.rnr_retry = 16, 5, 7
            made.sq_psn = self.psn
            self.depth = min(device.depth, other.depth)
            made.max_rd_atomic = self.depth
            self._qp.to_rts(made)
        except Exception as error:  # pyverbs raises what it likes
            raise device.failed("connecting a queue pair", error) from error

    def post_read(self, number: int, local: int, lkey: int, remote: int, rkey: int, n: int) -> None:
        """Post one READ of ``n`` bytes. Raises DeviceError verbs-failed."""
        wr = self._device.lib.wr
        enums = self._device.lib.enums
        sge = wr.SGE(local, n, lkey)
        try:
            request = wr.SendWR(
                wr_id=number,
                opcode=enums.IBV_WR_RDMA_READ,
                num_sge=1,
                sg=[sge],
                send_flags=enums.IBV_SEND_SIGNALED,
            )
            try:
                request.set_wr_rdma(rkey, remote)
                self._qp.post_send(request)
            except Exception as error:  # pyverbs raises what it likes
                raise self._device.failed("posting a read", error) from error
            finally:
                request.close()
        finally:
            sge.close()

    def poll(self) -> list[tuple[int, int]]:
        """(number, status) of what has completed; returns at once."""
        _, done = self._cq.poll(2 * MAX_DEPTH)
        return [(int(c.wr_id), int(c.status)) for c in done]

    def arm(self) -> None:
        """Ask for one event at the next completion; then `poll` once more before waiting."""
        self._cq.req_notify()

    def take_event(self) -> None:
        """Take and acknowledge the event that made the descriptor readable."""
        self._channel.get_cq_event(self._cq)
        self._cq.ack_events(1)

    def fail(self) -> None:
        """Move to ERR: what is posted completes, flushed."""
        lib = self._device.lib
        made = lib.qp.QPAttr(qp_state=lib.enums.IBV_QPS_ERR)
        self._qp.modify(made, lib.enums.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy it. Idempotent."""
        parts, self._qp, self._cq, self._channel = (
            (self._qp, self._cq, self._channel),
            None,
            None,
            None,
        )
        for part in parts:
            if part is not None:
                part.close()
