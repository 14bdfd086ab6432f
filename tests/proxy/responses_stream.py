"""What a Responses stream must be, event by event: a state machine that refuses everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Wire = dict[str, Any]
TERMINAL = {
    "response.completed": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
}
_TEXTS = {  # item type -> (name of its delta and done events, the field that they fill)
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
_PARTED = {  # item type -> (name of part events, of delta events, the index they have, where the parts are)
    "message": ("content_part", "output_text", "content_index", "content"),
    "reasoning": ("reasoning_summary_part", "reasoning_summary_text", "summary_index", "summary"),
}


class BrokenStream(Exception):
    """An event that may not stand where it stands."""


def demand(condition: object, what: str, event: Wire) -> None:
    if not condition:
        raise BrokenStream(f"{what}: {json.dumps(event)[:300]}")


@dataclass
class _Item:
    """An item that was added and is not done."""

    index: int
    added: Wire
    parts: list[Wire] = field(default_factory=list)
    text: list[str] | None = None
    """Deltas since the part, or the item, began; None where no text is open."""
    told: str | None = None
    """The text of the `done` event, once there was one."""
    logprobs: list[Wire] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.added["type"]


def check(events: Sequence[Wire]) -> Wire:
    """The final response. Raises BrokenStream with the event that is wrong."""
    first, *rest = events
    demand(first["type"] == "response.created", "the first event is not response.created", first)
    demand(first["response"]["status"] == "in_progress", "it begins in another state", first)
    demand(first["response"]["output"] == [], "it begins with output", first)
    done: list[Wire] = []
    open_item: _Item | None = None
    for number, event in enumerate(events):
        demand(event["sequence_number"] == number, "sequence numbers have a gap", event)
    for event in rest[:-1]:
        kind = event["type"]
        if kind == "response.in_progress":
            demand(event is rest[0] and event["response"] == first["response"], "a late or changed start", event)
        elif kind == "response.output_item.added":
            demand(open_item is None, "an item is added within another", event)
            demand(event["output_index"] == len(done), "items skip an index", event)
            open_item = _added(event)
        else:
            demand(open_item is not None, "an event of no item", event)
            assert open_item is not None
            demand(event.get("output_index") == open_item.index, "another item's index", event)
            if kind == "response.output_item.done":
                done.append(_finished(open_item, event))
                open_item = None
            else:
                demand(event.get("item_id") == open_item.added["id"], "another item's id", event)
                _within(open_item, event)
    return _ended(first, events[-1], done, open_item)


def _added(event: Wire) -> _Item:
    item = event["item"]
    demand(item.get("status", "in_progress") == "in_progress", "an item is added in another state", event)
    named = _TEXTS.get(item["type"])
    parted = _PARTED.get(item["type"])
    demand(not named or item[named[1]] == "", "a call is added with its text", event)
    demand(not parted or item[parted[3]] == [], "an item is added with its parts", event)
    return _Item(event["output_index"], item, text=[] if named else None)


def _within(item: _Item, event: Wire) -> None:
    """One event between an item's `added` and `done`."""
    if item.kind in _PARTED:
        part, text, index, _ = _PARTED[item.kind]
        demand(event.get(index) == len(item.parts), "parts skip an index", event)
        if event["type"] == f"response.{part}.added":
            demand(item.text is None and event["part"]["text"] == "", "a part within another", event)
            item.text, item.told, item.logprobs = [], None, []
            return
        if event["type"] == f"response.{part}.done":
            demand(item.told is not None and event["part"]["text"] == item.told, "a part that differs", event)
            item.parts.append(event["part"])
            item.text = None
            return
    else:
        demand(item.kind in _TEXTS, "an event of an item that has none", event)
        text, _ = _TEXTS[item.kind]
    demand(item.text is not None and item.told is None, "text outside of its part", event)
    assert item.text is not None
    item.logprobs += event.get("logprobs", [])
    if event["type"] == f"response.{text}.delta":
        demand(event["delta"], "an empty delta", event)
        item.text.append(event["delta"])
        return
    demand(event["type"] == f"response.{text}.done", "an event of no meaning here", event)
    item.told = event[_TEXTS[item.kind][1] if item.kind in _TEXTS else "text"]
    demand(item.told == "".join(item.text), "the deltas do not add up to the text", event)
    if "logprobs" in event:
        spread = item.logprobs[: len(item.logprobs) - len(event["logprobs"])]
        demand(spread == event["logprobs"], "the deltas' log-probabilities do not add up", event)


def _finished(item: _Item, event: Wire) -> Wire:
    done = event["item"]
    same = {"type", "id", "call_id", "name", "namespace", "role"}
    demand(
        {k: v for k, v in item.added.items() if k in same} == {k: v for k, v in done.items() if k in same},
        "an item ends as another", event,
    )  # fmt: skip
    demand(done.get("status", "completed") in ("completed", "incomplete"), "an item ends unfinished", event)
    if item.kind in _PARTED:
        demand(item.text is None and done[_PARTED[item.kind][3]] == item.parts, "parts got lost", event)
    if item.kind in _TEXTS:
        demand(item.told is not None and done[_TEXTS[item.kind][1]] == item.told, "the call differs", event)
    return done


def _ended(first: Wire, last: Wire, done: Sequence[Wire], open_item: _Item | None) -> Wire:
    demand(last["type"] in TERMINAL, "the last event is no terminal one", last)
    response = last["response"]
    demand(response["status"] == TERMINAL[last["type"]], "the status is another's", last)
    demand(response["id"] == first["response"]["id"], "it ends as another response", last)
    if response["status"] == "failed":
        demand(response["error"]["code"] and response["error"]["message"], "a failure without a reason", last)
        return response
    demand(open_item is None, "it ends within an item", last)
    demand(response["output"] == list(done), "the output differs from its items", last)
    demand(response["usage"]["total_tokens"] > 0, "no usage", last)
    reason = {"reason": "max_output_tokens"} if response["status"] == "incomplete" else None
    demand(response["incomplete_details"] == reason, "no reason", last)
    return response


def parse(lines: Iterable[str]) -> list[Wire]:
    """Events of server-sent lines, as a plain reader has them: `event:` agrees with the data's type."""
    events: list[Wire] = []
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
            demand(events[-1]["type"] == name, f"named {name}", events[-1])
        else:
            assert line == "" or line.startswith(":"), line
    return events
