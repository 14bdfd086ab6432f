"""What runs inside a container beside the agent: its first process, and one supervisor for each command.

Run by the interpreter of the kit (`kit`), standard library only, in an image that need not have a Python of its own.

    inside init PORT SOCKET TTL    PID 1: relays 127.0.0.1:PORT to SOCKET ("0 -": no relay), reaps, ends after TTL s
    inside run                     starts what stdin describes, and ends when it and all it has started have ended
    inside census                  has PID 1 kill what outlived a supervisor, and waits until it is gone

On `run`'s stdin: four bytes of length, a JSON object, then what the object announces. None of it is on a command line.

    mode       "exec": a command; "pack": tar of `path` to stdout; "unpack": tar from stdin to `path`;
               "probe": see `probe`; "share": let everybody write to `places`
    nonce      what comes before the report
    argv       of "exec"; or `script`, which a shell of the image reads from a descriptor; with env, cwd
    stdin      of "exec": how many bytes follow; the command finds them, and then the end
    places     of "probe" and "share"

Anything more on stdin, and its end above all, is a deadline: every process that the command has started is killed. So
the death of the client is its agents' death. The last thing on stderr, written when nobody else is left to write, is
the report: nonce, JSON object (code, oom, error), newline. A run without a report was ended from outside.
"""

# ruff: noqa: SIM105, PTH101, PTH103, PTH110, PTH112, PTH118, PTH120, PTH123 - each import is paid for each time

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time

from . import archive, forward

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh", "/system/bin/sh")
_OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
LOST = 113
"""The exit code of a supervisor whose client has gone: a report would reach nobody."""
_PREFERRED_VICTIM = b"500"
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36


def main() -> NoReturn:
    mode = sys.argv[1]
    if mode == "init":
        init(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    elif mode == "census":
        os._exit(census())
    os._exit(run())


# --- the first process -----------------------------------------------------------------------------------------------


def init(port: int, target: str, seconds: int) -> NoReturn:
    """Only signals from outside the container end it: those have no sender here. Orphans are a supervisor's remains."""
    told = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, told)
    signal.alarm(seconds)
    if port:
        listener = forward.listening(port)
        threading.Thread(target=forward.accept, args=(listener, target), daemon=True).start()
    while True:
        came = signal.sigwaitinfo(told)
        if came.si_signo in (signal.SIGCHLD, signal.SIGUSR1):
            kill_tree()
        elif not came.si_pid:
            os._exit(0)


def census() -> int:
    """0 once the first process has no child left, 1 where it still has after ten seconds."""
    deadline = time.monotonic() + 10
    while any(parent == 1 for _, parent in forward.processes()):
        if time.monotonic() > deadline:
            return 1
        os.kill(1, signal.SIGUSR1)
        time.sleep(0.01)
    return 0


# --- one command -----------------------------------------------------------------------------------------------------


def run() -> int:
    start = read_start()
    if start is None:
        return 1  # the client went away before it had said what to do
    nonce = start["nonce"].encode()
    report = supervise(start) if start["mode"] == "exec" else work(start)
    write_report(nonce + json.dumps(report).encode() + b"\n")
    return report["code"]


def read_start() -> dict[str, Any] | None:
    size = exactly(4)
    content = exactly(int.from_bytes(size, "big")) if size else None
    return json.loads(content) if content else None


def exactly(size: int) -> bytes | None:
    pieces: list[bytes] = []
    while size:
        piece = os.read(0, min(size, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def write_report(content: bytes) -> None:
    """The command may have left the pipe in another mode than it found it."""
    os.set_blocking(2, True)
    try:
        while content:
            content = content[os.write(2, content) :]
    except OSError:
        pass


def supervise(start: dict[str, Any]) -> dict[str, Any]:
    given = given_stdin(start["stdin"])
    if given is None:
        return {"code": 137, "oom": False, "error": "the client went away"}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    kills = oom_kills()
    woken = wake_on_child()
    child = spawn(start, given)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)  # nobody inside reads our nonce, or writes to our descriptors
    code = wait(child, woken)
    kill_tree()
    return {"code": code, "oom": code == 137 and oom_kills() > kills, "error": None}


def given_stdin(size: int) -> int | None:
    """A descriptor to read `size` bytes from; all are taken now, so that what comes after them is seen at once."""
    if not size:
        return os.open("/dev/null", os.O_RDONLY)
    fd = os.memfd_create("stdin")
    while size:
        piece = os.read(0, min(size, 1 << 20))
        if not piece:
            return None
        os.write(fd, piece)
        size -= len(piece)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def wake_on_child() -> int:
    outlet, inlet = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(inlet, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, nothing)
    return outlet


def nothing(number: int, frame: object) -> None:
    """That there is a handler is what wakes us."""


def spawn(start: dict[str, Any], given: int) -> int:
    pid = os.fork()
    if pid:
        os.close(given)
        return pid
    code = 126
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        prefer_as_victim()
        os.dup2(given, 0)
        os.chdir(start["cwd"])
        argv = start["argv"] or script(start["script"])
        os.execvpe(argv[0], argv, start["env"])
    except OSError as error:
        in_cwd = error.filename == start["cwd"]
        code = 127 if isinstance(error, FileNotFoundError) and not in_cwd else 126
        forward.report(f"{start['cwd'] if in_cwd else (start['argv'] or ['no shell'])[0]}: {error.strerror}")
    finally:
        os._exit(code)


def script(text: str) -> list[str]:
    """The argument vector that has a shell read `text` from a descriptor."""
    fd = os.memfd_create("script", 0)
    view = memoryview(text.encode(errors="surrogateescape"))
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    shell = next((shell for shell in _SHELLS if os.path.exists(shell)), _SHELLS[-2])
    return [shell, f"/proc/self/fd/{fd}"]


def prefer_as_victim() -> None:
    """Where memory runs out the command is to die, not what watches it."""
    try:
        with open("/proc/self/oom_score_adj", "wb") as stream:
            stream.write(_PREFERRED_VICTIM)
    except OSError:
        pass


def wait(child: int, woken: int) -> int:
    """Reap until the command has ended; its exit code; 137 where the client says so, LOST where it has gone."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        if (code := reaped(child)) is not None:
            return code
        ready = {fd for fd, _ in poll.poll()}
        if 0 in ready:
            return 137 if os.read(0, 1) else LOST
        os.read(woken, 4096)


def reaped(child: int) -> int | None:
    code = None
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                code = 128 + os.WTERMSIG(found[1]) if os.WIFSIGNALED(found[1]) else os.WEXITSTATUS(found[1])
    except ChildProcessError:
        pass
    return code


def kill_tree() -> None:
    """Kill and reap all descendants. They are stopped first: what is stopped cannot fork faster than it is killed."""
    while True:
        stopped: set[int] = set()
        while new := set(forward.descendants()) - stopped:
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


def oom_kills() -> int:
    """How many processes of this container the kernel has killed for want of memory."""
    for path in _OOM_COUNTERS:
        try:
            with open(path, "rb") as stream:
                counts = dict(line.split()[:2] for line in stream)
            return int(counts.get(b"oom_kill", 0))
        except (OSError, ValueError):
            continue
    return 0


# --- files -----------------------------------------------------------------------------------------------------------


def work(start: dict[str, Any]) -> dict[str, Any]:
    """What a supervisor does by itself. An error is told, and is no exit code."""
    try:
        found = WORK[start["mode"]](start)
    except (OSError, ValueError, EOFError) as error:
        return {"code": 1, "oom": False, "error": str(error)}
    return {"code": 0, "oom": False, "error": None, "found": found}


def pack(start: dict[str, Any]) -> None:
    threading.Thread(target=end_with_client, daemon=True).start()
    for piece in archive.pack(os.path.join(str(start["cwd"]), str(start["path"]))):
        view = memoryview(piece)
        while view:
            view = view[os.write(1, view) :]


def end_with_client() -> NoReturn:
    os.read(0, 1)
    os._exit(137)


def unpack(start: dict[str, Any]) -> None:
    target = os.path.join(str(start["cwd"]), str(start["path"]))
    os.makedirs(os.path.dirname(target) or "/", exist_ok=True)
    archive.unpack(lambda size: os.read(0, size), target)


def probe(start: dict[str, Any]) -> dict[str, Any]:
    """Who commands run as, and which of `places` are directories that they can write to."""
    places = start["places"]
    home = os.environ.get("HOME", "/")
    return {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "home": home,
        "there": [place for place in (*places, home) if os.path.isdir(place)],
        "writable": [place for place in (*places, home) if os.access(place, os.W_OK | os.X_OK)],
    }


def share(start: dict[str, Any]) -> None:
    for place in start["places"]:
        os.chmod(place, 0o1777)


WORK = {"pack": pack, "unpack": unpack, "probe": probe, "share": share}
