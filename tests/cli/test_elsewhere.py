"""The suite's own witness: it sees what a program in a sandbox reaches for, and a program that stays at home."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..runtimes.boxes import sandbox
from .elsewhere import NOTE, reached, watched

pytestmark = pytest.mark.anyio
AT_HOME = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
"""


@pytest.mark.parametrize(
    ("program", "seen", "exit_code"),
    [
        (AT_HOME, False, 0),
        ("import socket; socket.create_connection(('192.0.2.1', 443))", True, 1),
        ("import socket; socket.create_connection(('2001:db8::1', 443))", True, 1),
        ("import socket; socket.getaddrinfo('registry.example.org', 443)", True, 1),
        ("import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53)); exit(7)", True, 7),
    ],
)
async def test_what_is_reached_for_is_counted_and_the_program_ends_as_it_does(
    program: str, seen: bool, exit_code: int, tmp_path: Path
) -> None:
    async with sandbox(root=tmp_path) as box:
        await box.upload(program.encode(), "/tmp/program.py")
        result = await box.exec(watched("cd /tmp\nexec python3 program.py\n"), timeout=60)
        note = await box.exec(("cat", f"{box.workdir}/{NOTE}"))
    assert result.exit_code == exit_code, result.text
    assert bool(reached(note.stdout.decode())) is seen
