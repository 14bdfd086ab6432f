"""What stays beside an instance on this machine, out of its agents' reach: their way to the proxy, and their end.

Run as `python -I -S guard.py FD`, standard library only. FD holds a JSON object:

    pid                 the instance's first process, as seen from here
    listen, socket      TCP port on the instance's own 127.0.0.1 whose connections are relayed to this Unix socket;
                        null: no relay
    ttl                 seconds after which the instance is killed whatever happens
    started, life       descriptors: one byte is written to the first once the port listens; the end of the second,
                        which comes with the trainer's death at the latest, is the instance's end

Every process of the instance has ended when this one does.
"""

# ruff: noqa: PTH100, PTH120, PTH123 - `forward` is imported as the program that it is

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import forward

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


def main() -> NoReturn:
    with open(int(sys.argv[1]), "rb") as stream:
        start: dict[str, Any] = json.loads(stream.read())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    instance = os.pidfd_open(start["pid"])
    if start["listen"] is not None:
        enter_network(start["pid"])
        listener = forward.listening(start["listen"])
        threading.Thread(target=forward.accept, args=(listener, start["socket"]), daemon=True).start()
    os.write(start["started"], b"1")
    wait((instance, start["life"]), start["ttl"])
    end(instance)
    os._exit(0)


def enter_network(pid: int) -> None:
    """The instance's user namespace, which owns its network, and then that: sockets made from here on belong there."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptors = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net")]
    for fd in descriptors:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), "cannot enter the instance's network")


def wait(descriptors: tuple[int, ...], seconds: float) -> None:
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    poll.poll(seconds * 1000)


def end(instance: int) -> None:
    """With its first process the kernel kills all others, and waits for them."""
    try:
        signal.pidfd_send_signal(instance, signal.SIGKILL)
        wait((instance,), 10)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    main()
