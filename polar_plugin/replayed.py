"""Recorded sessions, built again: what the commands `replay` and `explain` and `polar_plugin.testing` share."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio

from . import plugins
from .engine.tokenizer import load_tokenizer
from .errors import ConfigError, RecordingError
from .merge.check import Decode, check
from .merge.compare import Built, compared
from .merge.expect import Expectation, Expectations, dumps, found, loads
from .merge.expect import disagreements as differing
from .merge.explain import Explanation, explain
from .merge.explain_text import TORN
from .merge.traces import counts, trace_json
from .merge.untrained import Policy
from .recording import Recording, load, load_header, name_of, recordings
from .records import CompletionSession, Trace


@dataclass(frozen=True)
class Builder:
    """A trajectory builder by name (or "pkg.mod:Class") and configuration."""

    name: str = "prefix_merging"
    config: Mapping[str, Any] | None = None

    def built(self, session: CompletionSession, decode: Decode | None = None) -> Built:
        """The traces, checked. Raises ConfigError, or MergeError where an invariant does not hold."""
        builder = plugins.create(self.name, plugins.BUILDERS, "builder", self.config or {})
        if not callable(getattr(builder, "build", None)):
            raise ConfigError(f"builder {self.name!r} has no method `build`: see merge.builders.Builder")
        made: Any = builder.build(session)
        if inspect.isawaitable(made):
            made = anyio.run(_awaited, made)
        traces, policy = cast("tuple[Trace, ...]", tuple(made)), cast("Policy | None", getattr(builder, "policy", None))
        check(traces, session, policy, decode=decode)
        return Built(self.name, traces, policy)


async def _awaited(made: Any) -> Any:
    return await made


@dataclass(frozen=True)
class Replayed:
    """A recorded session and the traces that a builder makes of it now."""

    path: Path
    recording: Recording
    built: Built
    decode: Decode | None
    """Tokens as text; None without a tokenizer."""
    decoded_by: str
    """What decodes the tokens, or why nothing does."""

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return name_of(self.path)

    @property
    def session(self) -> CompletionSession:
        return self.recording.session

    @property
    def traces(self) -> tuple[Trace, ...]:
        return tuple(self.built.traces)

    @property
    def outcome(self) -> Expectation:
        """Counts, fractions, breaks and the digest of the masks, as an expectation file has them."""
        return found(self.session, self.built.traces, self.built.policy)

    def explained(self) -> Explanation:
        torn = bool(self.recording.torn)
        return explain(self.session, self.built.traces, self.built.policy, decode=self.decode, torn=torn)


def replay(path: Path, builder: Builder | None = None, tokenizer: str | Path | None = None) -> Replayed:
    """Read a recording and build its traces. Raises RecordingError, ConfigError or MergeError."""
    recording = load(path)
    decode, told = _decoder(recording, tokenizer)
    built = (builder or Builder()).built(recording.session, decode)
    return Replayed(path, recording, built, decode, told)


def files(paths: Iterable[Path], session: str | None = None) -> list[Path]:
    """The recordings that `paths` are or hold; with `session` only those of that session id or file name.

    Raises RecordingError that says which sessions there are.
    """
    found = [one for path in paths for one in recordings(path)]
    if session is None:
        return found
    ids = {path: (name_of(path), load_header(path).session_id) for path in found}
    chosen = [path for path in found if session in ids[path]]
    if not chosen:
        known = ", ".join(name if name == one else f"{name} ({one})" for name, one in ids.values())
        raise RecordingError(f"no session {session!r} here; there is {known}")
    return chosen


def _decoder(recording: Recording, tokenizer: str | Path | None) -> tuple[Decode | None, str]:
    named = str(recording.header.tokenizer.get("name") or "")
    if tokenizer is None and not named:
        return None, "token ids are shown: the recording names no tokenizer (give one with --tokenizer DIRECTORY)"
    if tokenizer is None and not Path(named).is_dir():
        return None, f"token ids are shown: the tokenizer {named!r} is not on this machine (--tokenizer DIRECTORY)"
    chosen = str(tokenizer or named)
    loaded = _loaded(chosen)
    largest = max(_largest_ids(recording.session), default=0)
    if largest >= max(loaded.vocab_size, len(loaded.hf)):
        raise ConfigError(
            f"tokenizer {chosen!r} has {loaded.vocab_size} ids, but session {recording.header.session_id} has the token"
            f" {largest}: give the tokenizer of the model that sampled it with --tokenizer"
        )
    return loaded.decode, f"tokens are decoded with {chosen}"


_loaded = functools.cache(load_tokenizer)


def _largest_ids(session: CompletionSession) -> Iterator[int]:
    outputs = (completion.generation.output_ids for completion in session.completions)
    return (int(ids.max()) for ids in outputs if len(ids))


# --- what the commands print -----------------------------------------------------------------------------------------


def summary(one: Replayed) -> str:
    """The traces in a few lines."""
    told = counts(one.session, one.traces, one.built.policy)
    lines = [f"{one.path}: {len(one.traces)} traces of {told['completions']} completions by {one.built.builder}"]
    if one.recording.torn:
        lines.append(f"  {TORN}")
    for number, trace in enumerate(one.traces):
        size = f"{len(trace.prompt_ids)} prompt + {len(trace.response_ids)} response tokens"
        lines.append(f"  trace {number} ({trace.role}): {size}, {trace.trained} trained")
    reasons = {name: count for name, count in told.items() if name.startswith(("untrained_", "breaks_")) and count}
    return "\n".join([*lines, f"  {json.dumps(reasons)}"])


def traces_json(one: Replayed) -> str:
    """One line of JSON: file, whether it is torn, counts, traces (`merge.traces.trace_json`)."""
    told = counts(one.session, one.traces, one.built.policy)
    traces = [trace_json(trace) for trace in one.traces]
    torn = bool(one.recording.torn)
    return json.dumps(
        {"file": str(one.path), "torn": torn, "builder": one.built.builder, "counts": told, "traces": traces}
    )


def difference(one: Replayed, other: Builder) -> str:
    """What the other builder makes of the session, line by line against what is."""
    lines = compared(one.session, one.built, other.built(one.session, one.decode))
    return "\n".join(f"  {line}" for line in lines) or f"  {other.name} makes the same traces"


# --- expectation files -----------------------------------------------------------------------------------------------


def read_expectations(path: Path) -> Expectations:
    """Raises ConfigError."""
    try:
        return loads(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the expectation file {path}: {error}") from error


def write_expectations(path: Path, found: Iterable[Replayed], builder: Builder) -> None:
    """What is found, as what shall be. Raises ConfigError where two recordings have one name, or on an error of I/O."""
    sessions: dict[str, Expectation] = {}
    for one in found:
        if one.name in sessions:
            raise ConfigError(f"two recordings are named {one.name!r}: an expectation file tells them apart by name")
        sessions[one.name] = one.outcome
    try:
        path.write_text(dumps(Expectations(sessions, builder=builder.name, config=builder.config or {})))
    except OSError as error:
        raise ConfigError(f"cannot write the expectation file {path}: {error}") from error


def disagreements(found: Iterable[Replayed], expected: Expectations, where: str) -> list[str]:
    """Each thing that is not as expected, in a line; a recording that is not there, or that `where` does not name."""
    outcomes = {one.name: one.outcome for one in found}
    lines = [f"{where}: session {name} is not among the recordings" for name in expected.sessions.keys() - outcomes]
    for name, outcome in outcomes.items():
        if name not in expected.sessions:
            lines.append(f"{where}: nothing is expected of session {name}; write the file anew with --write-expect")
        else:
            told = differing(expected.sessions[name], outcome)
            lines += [f"{where}: session {name}: {line}" for line in told]
    return lines
