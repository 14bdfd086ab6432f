"""Whether an agent program reached for anything but the proxy: the kernel counts what it has no route for.

A program's network is a loopback interface and nothing else. A connection to another host, and the look-up of its name,
fails at once there, whatever the program says of it; so does a datagram to a port of the loopback interface on which
nobody listens, such as a name server's.
"""

from __future__ import annotations

import re
from dataclasses import replace

from polar_plugin import plugins
from polar_plugin.harnesses.base import Launch, LaunchContext

NOTE = ".elsewhere"
"""The file, in the working directory, with what the kernel counted until the program's end."""
_V4 = {"Ip": "OutNoRoutes", "Udp": "NoPorts"}
_V6 = ("Ip6OutNoRoutes", "Udp6NoPorts")


def watched(script: str) -> str:
    """`script`, behind which `NOTE` is written; it ends as `script` does."""
    return (
        f'note="$PWD/{NOTE}"\n({script}\n)\ncode=$?\n'
        f"grep -hE '^({'|'.join((*_V4, *_V6))})' /proc/net/snmp /proc/net/snmp6 > \"$note\"\nexit $code\n"
    )


def reached(note: str) -> int:
    """How often the program tried to reach another host."""
    tables = re.findall(r"^(\w+): (.*)\n\1: (.*)$", note, re.MULTILINE)
    v4 = {name: dict(zip(keys.split(), map(int, values.split()), strict=True)) for name, keys, values in tables}
    v6 = dict(re.findall(r"^(\w+)\s+(\d+)$", note, re.MULTILINE))
    return sum(v4[table][key] for table, key in _V4.items()) + sum(int(v6[key]) for key in _V6)


class Watched:
    """The preset that `settings.preset` names, with its program watched."""

    name = "watched"

    def launch(self, context: LaunchContext) -> Launch:
        settings = {**context.agent.settings}
        preset = plugins.create(settings.pop("preset"), plugins.HARNESSES, "harness", {})
        launch = preset.launch(replace(context, agent=replace(context.agent, settings=settings)))
        assert isinstance(launch.command, str)
        return replace(launch, command=watched(launch.command))
