"""A TCP port inside a sandbox that leads to the proxy's Unix socket, so that the sandbox needs no network.

Run inside, by whatever Python 3.8+ the sandbox has: `python3 forward.py PORT SOCKET COMMAND...`. It listens on
127.0.0.1:PORT, then runs COMMAND and ends with its exit code. Standard library only; it imports nothing of ours.
"""

import os
import selectors
import socket
import subprocess
import sys
import threading


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def connect(client: socket.socket, path: str) -> None:
    upstream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        upstream.connect(path)
    except OSError:
        client.close()
        return
    back = threading.Thread(target=pump, args=(upstream, client), daemon=True)
    back.start()
    pump(client, upstream)
    back.join()
    client.close()
    upstream.close()


def serve(listener: socket.socket, path: str) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while selector.select():
            client, _ = listener.accept()
            threading.Thread(target=connect, args=(client, path), daemon=True).start()


def main() -> int:
    port, path, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=serve, args=(listener, path), daemon=True).start()
    code = subprocess.Popen(command).wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
