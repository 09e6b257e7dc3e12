#!/usr/bin/env python3
"""Run one command in a throw-away QEMU guest that has real RDMA verbs (Soft-RoCE).

The guest boots Debian's stock kernel with a small initramfs (static busybox and a dozen modules),
mounts this machine's root read-only over 9p with a tmpfs overlay, makes ``rxe0`` and ``rxe1`` on
the two ends of a veth cable, and runs the command at the same path, with the same interpreter and
checkout. No card, no disk image. It needs no KVM. Only the standard library is used, so that any
python3 can run it.

What it owns: the guest process, killed at the time-out. The exit code is the command's; 124 when
the guest ended without one.

    rxevm.py --cache DIR [--env K=V] [--timeout S] -- COMMAND...
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WANTED = (
    "virtio_pci 9pnet_virtio 9p overlay veth crc32_generic ib_uverbs rdma_ucm rdma_rxe virtio_rng"
    " sch_netem"
).split()
KERNEL_PARTS = (
    "drivers/virtio drivers/net net/9p net/ipv4 net/ipv6 fs/9p fs/netfs fs/fscache fs/configfs"
    " net/sched fs/overlayfs crypto arch/x86/crypto lib drivers/infiniband/core"
    " drivers/infiniband/sw drivers/char/hw_random"
).split()

INIT = r"""#!/bin/busybox sh
BB=/bin/busybox
$BB mkdir -p /proc /sys /dev /host /ovl /guest
$BB mount -t proc proc /proc
$BB mount -t sysfs sys /sys
$BB mount -t devtmpfs dev /dev
echo 4 > /proc/sys/kernel/printk
for m in $($BB cat /mods/order); do
  $BB insmod /mods/$m 2>/tmp.err || echo "rxevm: insmod $m failed: $($BB cat /tmp.err)"
done
$BB mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 hostroot /host \
  || { echo "@@EXIT 97"; $BB poweroff -f; }
$BB mount -t tmpfs tmpfs /ovl
$BB mkdir -p /ovl/up /ovl/wk
$BB mount -t overlay -o lowerdir=/host,upperdir=/ovl/up,workdir=/ovl/wk,xino=off ovl /guest \
  || { echo "@@EXIT 96"; $BB poweroff -f; }
for d in proc sys dev; do $BB mount --move /$d /guest/$d; done
$BB mount -t tmpfs tmpfs /guest/run
$BB mkdir -p /guest/dev/shm /guest/dev/pts /guest/run/rxevm
$BB mount -t tmpfs tmpfs /guest/dev/shm
$BB mount -t devpts devpts /guest/dev/pts
$BB cp /job.sh /guest/run/job.sh
$BB cp /bin/busybox /guest/run/rxevm/busybox
exec $BB switch_root /guest /bin/sh /run/job.sh
"""

# Both ends are in one kernel; policy routing sends their packets over the cable all the same, so
# completions come later, and a cut cable is a cut cable.
JOB = r"""
ip link set lo up
ip link add va mtu 4200 type veth peer name vb mtu 4200
ip link add vc mtu 4200 type veth peer name vd mtu 4200
for d in va vb vc vd; do
  echo 1 > /proc/sys/net/ipv4/conf/$d/accept_local
  echo 0 > /proc/sys/net/ipv4/conf/$d/rp_filter
done
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
echo 1 > /proc/sys/net/ipv4/conf/all/accept_local
ip addr add 10.77.0.1/32 dev va; ip addr add 10.77.0.2/32 dev vb
ip addr add 10.77.1.1/32 dev vc; ip addr add 10.77.1.2/32 dev vd
cat > /run/rxevm/mend <<'MEND'
#!/bin/sh
set -e
cable() {
  ip link set $2 up; ip link set $3 up
  ip route replace 10.77.$1.2/32 dev $2 table 1${1}0
  ip route replace 10.77.$1.1/32 dev $3 table 1${1}1
  ip neigh replace 10.77.$1.2 lladdr $(cat /sys/class/net/$3/address) nud permanent dev $2
  ip neigh replace 10.77.$1.1 lladdr $(cat /sys/class/net/$2/address) nud permanent dev $3
}
cable 0 va vb
cable 1 vc vd
MEND
chmod +x /run/rxevm/mend
ip rule add pref 1000 lookup local; ip rule del pref 0
for n in 0 1; do
  ip rule add pref 1${n}0 iif lo from 10.77.$n.1 to 10.77.$n.2 lookup 1${n}0
  ip rule add pref 1${n}1 iif lo from 10.77.$n.2 to 10.77.$n.1 lookup 1${n}1
done
/run/rxevm/mend
# RDMA wants a fabric that drops nothing: eight rails send 2048 packets at once, and the default
# backlog holds 1000.
echo 16384 > /proc/sys/net/core/netdev_max_backlog
rdma link add rxe0 type rxe netdev va || echo "rxevm: rdma link add failed"
rdma link add rxe1 type rxe netdev vb || echo "rxevm: rdma link add failed"
rdma link add rxe2 type rxe netdev vc || echo "rxevm: rdma link add failed"
rdma link add rxe3 type rxe netdev vd || echo "rxevm: rdma link add failed"
ulimit -l unlimited
export @@ENV@@
cd @@CWD@@
( @@CMD@@ )
echo "@@EXIT $?"
exec /run/rxevm/busybox poweroff -f
"""


def unpacked(cache: Path) -> Path:
    """Kernel and busybox, fetched by apt and unpacked, never installed; done once."""
    root = cache / "deb"
    done = root / f".done-{len(KERNEL_PARTS)}"
    if done.exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    loads = cache / "dl"
    loads.mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True)
    depends = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], check=True, capture_output=True, text=True
    ).stdout
    kernel = re.search(r"Depends: (linux-image-[\d.]+-\d+-amd64)\b", depends)
    if kernel is None:
        raise SystemExit("rxevm: apt knows no linux-image-amd64")
    for old in loads.glob("linux-image-*.deb"):
        old.unlink()  # one kernel only
    for package in (kernel.group(1), "busybox-static"):
        subprocess.run(
            ["apt-get", "download", "-q", package], cwd=loads, check=True, stdout=subprocess.DEVNULL
        )
    for deb in sorted(loads.glob("*.deb")):
        if not deb.name.startswith("linux-image"):
            subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
            continue
        # Only what is needed of a 400 MB tree; a kernel may lack some of these folders.
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as tar:
            wanted = [f"./lib/modules/*/kernel/{part}/*" for part in KERNEL_PARTS]
            subprocess.run(
                ["tar", "-x", "-C", root, "--wildcards", "./boot/vmlinuz-*", *wanted],
                stdin=tar.stdout,
                stderr=subprocess.DEVNULL,
                check=False,
            )
    done.touch()
    return root


def module_order(root: Path) -> list[Path]:
    """Module files in the order to load them, dependencies first."""
    index = {
        path.stem.replace("-", "_"): path for path in root.glob("lib/modules/*/kernel/**/*.ko")
    }
    order: list[Path] = []

    def add(name: str, needed: bool) -> None:
        path = index.get(name.replace("-", "_"))
        if path is None:
            if needed:
                raise SystemExit(f"rxevm: module {name} is not unpacked")
            print(f"rxevm: module {name} not found (built in?)", file=sys.stderr)
            return
        if path in order:
            return
        found = re.search(rb"(?:^|\0)depends=([^\0]*)\0", path.read_bytes())
        for other in found.group(1).decode().split(",") if found else ():
            if other:
                add(other, True)
        if path not in order:
            order.append(path)

    for name in WANTED:
        add(name, False)
    return order


def archive(files: list[tuple[str, int, bytes]]) -> bytes:
    """A cpio archive (newc) of (name, mode, bytes)."""
    out = bytearray()
    for number, (name, mode, data) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        raw = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + raw
        out += b"\0" * (-len(out) % 4) + data
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def initrd(root: Path, job: str) -> bytes:
    """What the guest starts from."""
    modules = module_order(root)
    order = "\n".join(path.name for path in modules) + "\n"
    files = [(name, 0o040755, b"") for name in ("bin", "mods", "dev")]
    files += [
        ("bin/busybox", 0o100755, (root / "bin/busybox").read_bytes()),
        ("init", 0o100755, INIT.encode()),
        ("job.sh", 0o100755, job.encode()),
        ("mods/order", 0o100644, order.encode()),
    ]
    files += [("mods/" + path.name, 0o100644, path.read_bytes()) for path in modules]
    return archive(files)


def run(args: argparse.Namespace) -> int:
    """Boot, run, and give the command's exit code."""
    root = unpacked(args.cache)
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env = [f"PATH={path}", "HOME=/tmp", *args.env]
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    job = (
        JOB.replace("@@ENV@@", shlex.join(env))
        .replace("@@CWD@@", shlex.quote(str(Path.cwd())))
        .replace("@@CMD@@", shlex.join(command))
    )
    work = Path(tempfile.mkdtemp(prefix="rxevm."))
    image = work / "initrd.cpio"
    image.write_bytes(initrd(root, job))
    [kernel] = root.glob("boot/vmlinuz-*")
    share = "mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap"
    qemu = [
        "qemu-system-x86_64", "-M", "q35,usb=off,hpet=off",
        "-accel", "tcg,thread=multi,tb-size=512", "-cpu", args.cpu,
        "-m", str(args.mem), "-smp", str(args.smp), "-kernel", str(kernel), "-initrd", str(image),
        "-append", "console=ttyS0 panic=-1 quiet mitigations=off nokaslr no_timer_check"
        " random.trust_cpu=on tsc=reliable rdinit=/init",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
        "-monitor", "none", "-net", "none", "-device", "virtio-rng-pci",
        "-virtfs", f"local,path=/,{share}",
    ]  # fmt: skip
    begun, code = time.monotonic(), None
    guest = subprocess.Popen(
        qemu, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    alarm = threading.Timer(args.timeout, guest.kill)
    alarm.start()
    try:
        assert guest.stdout is not None
        for raw in guest.stdout:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            found = re.search(r"@@EXIT (\d+)$", line)
            if found:
                code = int(found.group(1))
            else:
                print(line, flush=True)
        guest.wait()
    finally:
        alarm.cancel()
        if guest.poll() is None:
            guest.kill()
            guest.wait()
        shutil.rmtree(work)
    print(f"rxevm: guest ran {time.monotonic() - begun:.1f} s", file=sys.stderr)
    if code is None:
        print("rxevm: the guest ended without a result (time-out or panic)", file=sys.stderr)
        return 124
    return code


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder for what is fetched")
    parser.add_argument("--mem", type=int, default=1536, help="MiB")
    parser.add_argument("--smp", type=int, default=1, help="more stall each other on a busy host")
    parser.add_argument("--cpu", default="Nehalem", help="fastest without KVM")
    parser.add_argument("--timeout", type=float, default=480, help="seconds")
    parser.add_argument("--env", action="append", default=[], metavar="K=V")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
