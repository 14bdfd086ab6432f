"""bubblewrap's command line for one command in a sandbox. Pure, but that it looks how this machine is laid out.

What a program inside finds: the system's programs and libraries (read-only), a stub of /etc, its own /tmp, home and
workspace, its own process table, and either no network but a loopback of its own, or the host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HOME = "/home/agent"
CONTROL = "/run/polar"
UID = 1000
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("ld.so.cache", "alternatives", "localtime", "ssl/certs", "ssl/openssl.cnf", "mime.types")
"""No more of /etc than programs need: where root runs us, root's files are readable inside."""

ETC_STUBS: Mapping[str, str] = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{UID}:{UID}::{HOME}:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


@dataclass(frozen=True, slots=True)
class Mounts:
    """Host directories and files, by where they appear inside. Later ones may lie within earlier ones."""

    writable: Mapping[str, Path]
    read_only: Mapping[str, Path] = field(default_factory=dict[str, Path])


@dataclass(frozen=True, slots=True)
class Program:
    """The installed bubblewrap."""

    path: str
    can_disable_userns: bool
    """From 0.8.0 on: that no user namespace can be made inside."""


def arguments(program: Program, mounts: Mounts, *, share_network: bool, status_fd: int) -> Iterator[str]:
    """Everything before the command. bwrap writes its child's pid as JSON to `status_fd`."""
    yield program.path
    yield from ("--unshare-all", "--unshare-user", "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox")
    if share_network:
        yield "--share-net"
    if program.can_disable_userns:
        yield "--disable-userns"
    yield from ("--cap-drop", "ALL", "--die-with-parent", "--new-session", "--as-pid-1")
    yield from ("--json-status-fd", str(status_fd))
    yield from _system()
    yield from ("--proc", "/proc", "--dev", "/dev", "--dir", "/run", "--dir", "/var", "--symlink", "../tmp", "/var/tmp")
    if share_network:
        yield from ("--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf")
    for inside, host in mounts.writable.items():
        yield from ("--bind", str(host), inside)
    for inside, host in mounts.read_only.items():
        yield from ("--ro-bind", str(host), inside)
    # A root trainer's sandbox has root's rights on /proc/sys, and bubblewrap alone leaves it writable.
    yield from ("--remount-ro", "/proc", "--remount-ro", "/", "--chdir", "/")


def _system() -> Iterator[str]:
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)
    for name in _ETC:
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
