"""The first process of a sandbox: listens for the proxy, starts one command, reaps, and ends with its exit code.

Run inside as `python -I -S forward.py FD`, standard library only, Python >= 3.8. FD holds a JSON object:

    argv, env, cwd     what to start; nothing of it is on this process's own command line
    listen, socket     TCP port on 127.0.0.1 whose connections are relayed to this Unix socket; null: no relay
    limits             {"data": bytes, "nproc": count}, as RLIMIT_*
    started            descriptor that gets one byte once the command has been forked
    own_tree           true outside a PID namespace: kill all descendants at the end, on SIGTERM, and if the parent dies
    life               descriptor whose end is the end of the command and all its descendants, as SIGTERM and the
                       parent's death then are not; null: none

As PID 1 of its namespace it cannot be killed from inside, and the kernel ends the others when it ends. The port listens
before the command starts. Exit codes are the shell's: 128 + n for signal n, 127 not found, 126 not startable.
"""

# ruff: noqa: SIM105, PTH123, PTH208 - each import would be paid for at every command

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing costs as much as all the rest
    from collections.abc import Iterator
    from typing import Any, NoReturn

CHUNK = 65536


def main() -> NoReturn:
    fd = int(sys.argv[1])
    with open(fd, "rb") as stream:
        start: dict[str, Any] = json.loads(stream.read())
    started: int = start["started"]
    os.set_inheritable(started, False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if start["own_tree"]:
        adopt_descendants(tell=start["life"] is None)
    if start["life"] is not None:
        os.set_inheritable(start["life"], False)
    listener = None if start["listen"] is None else listening(start["listen"])
    child = spawn(start)
    if start["life"] is not None:
        threading.Thread(target=end_with, args=(start["life"],), daemon=True).start()
    if listener is not None:
        threading.Thread(target=accept, args=(listener, start["socket"]), daemon=True).start()
    code = wait(child)
    if start["own_tree"]:
        kill_descendants()
    os._exit(code)


# --- the command -----------------------------------------------------------------------------------------------------


def spawn(start: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 126
    try:
        os.write(start["started"], b"1")  # by the child: it may kill us as the first thing it does
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        limit(start["limits"])
        os.chdir(start["cwd"])
        os.execvpe(start["argv"][0], start["argv"], start["env"])
    except OSError as error:
        in_cwd = error.filename == start["cwd"]
        code = 127 if isinstance(error, FileNotFoundError) and not in_cwd else 126
        report(f"{start['cwd'] if in_cwd else start['argv'][0]}: {error.strerror}")
    finally:
        os._exit(code)


def limit(limits: dict[str, int]) -> None:
    import resource

    kinds = {"data": resource.RLIMIT_DATA, "nproc": resource.RLIMIT_NPROC}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, value in limits.items():
        resource.setrlimit(kinds[name], (value, value))


def report(text: str) -> None:
    os.write(2, f"sandbox: {text}\n".encode(errors="surrogateescape"))


def wait(child: int) -> int:
    """Reap whatever ends until the command does; its exit code."""
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:  # `end_with` was faster
            signal.pause()
            continue
        if pid == child:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


# --- the relay -------------------------------------------------------------------------------------------------------


def listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def accept(listener: socket.socket, target: str) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # out of descriptors, say: the next one may find some
            time.sleep(0.05)
            continue
        threading.Thread(target=relay, args=(client, target), daemon=True).start()


def relay(client: socket.socket, target: str) -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with client, server:
        try:
            server.connect(target)
        except OSError as error:
            report(f"cannot reach the proxy: {error.strerror}")
            return
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up = threading.Thread(target=copy, args=(client, server), daemon=True)
        up.start()
        copy(server, client)
        up.join()


def copy(source: socket.socket, sink: socket.socket) -> None:
    """Bytes, then the end of them: each side learns at once that the other has hung up."""
    try:
        while data := source.recv(CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


# --- without a PID namespace -----------------------------------------------------------------------------------------


def adopt_descendants(*, tell: bool) -> None:
    """Orphans become our children, so none escapes `kill_descendants`; a dead parent is a SIGTERM where `tell` says so.

    Else nothing inside ends us by SIGTERM: programs kill what has "python" in its name more often than one thinks.
    """
    import ctypes

    set_parent_death_signal, set_child_subreaper = 1, 36
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    if tell:
        libc.prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    signal.signal(signal.SIGTERM, on_terminate if tell else signal.SIG_IGN)


def on_terminate(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_descendants()
    os._exit(128 + number)


def end_with(life: int) -> None:
    os.read(life, 1)
    if os.getpid() != 1:
        kill_descendants()
    os._exit(137)


def kill_descendants() -> None:
    """They are stopped first: what is stopped cannot fork faster than it is killed."""
    while True:
        stopped: set[int] = set()
        while new := set(descendants()) - stopped:
            signal_all(new, signal.SIGSTOP)
            stopped |= new
        signal_all(stopped, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def descendants() -> Iterator[int]:
    parents = dict(processes())
    for pid in parents:
        ancestor = pid
        while ancestor in parents:
            ancestor = parents[ancestor]
            if ancestor == os.getpid():
                yield pid
                break


def processes() -> Iterator[tuple[int, int]]:
    """(pid, parent) of every process there is."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    yield int(name), int(stream.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue


if __name__ == "__main__":
    main()
