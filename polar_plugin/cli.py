"""`polar-plugin`: the commands. Each parses, calls, prints; errors of ours end in one message and exit code 2."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import anyio
import typer
from rich.console import Console
from rich.markup import escape

from . import plugins
from .errors import ConfigError, PolarError

P = ParamSpec("P")
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
_console = Console(width=None if sys.stdout.isatty() else 128)


def _told(command: Callable[P, int]) -> Callable[P, None]:
    """An error of ours is told in one message; the command's result is the exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except PolarError as error:
            Console(stderr=True).print(f"[red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)
            code = 2
        raise typer.Exit(code)

    run.__annotations__ = {**command.__annotations__, "return": None}
    return run


@app.command()
@_told
def quickstart(
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny` or a Hugging Face directory.")] = "smollm2",
    out: Annotated[Path, typer.Option(help="Where sessions, traces, samples and summary.json go.")] = Path("out"),
    attempts: Annotated[int, typer.Option(min=1, help="Attempts a task.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens a model call may sample.")] = 64,
    agent_script: Annotated[Path | None, typer.Option(help="Replies to sample by force.")] = None,
    isolation: Annotated[str, typer.Option(help="`bubblewrap`, or `none` to run agents as this user.")] = "bubblewrap",
    recipe: Annotated[Path | None, typer.Option(help="A folder with agent.py and tasks/.")] = None,
) -> int:
    """Run a black-box agent end to end on this machine, and prove that the training data is exact."""
    try:
        from .quickstart import Options
        from .quickstart import quickstart as run
    except ImportError as error:
        raise ConfigError(f"{error}: the embedded engine needs `pip install 'polar-plugin[engine]'`") from error
    options = Options(model, out, recipe, attempts, max_tokens, agent_script, isolation)
    return 0 if run(options, _console).exactness.holds else 1


@app.command(name="serve-engine")
@_told
def serve_engine(
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny` or a Hugging Face directory.")] = "smollm2",
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port.")] = 30000,
    context_length: Annotated[int | None, typer.Option()] = None,
) -> int:
    """Serve the embedded engine behind SGLang's HTTP routes, so that the SGLang client meets a live server anywhere."""
    try:
        from .config import cache_directory
        from .engine.models import resolve_model
        from .engine.serve import serve
        from .engine.transformers import TransformersEngine
    except ImportError as error:
        raise ConfigError(f"{error}: the embedded engine needs `pip install 'polar-plugin[engine]'`") from error
    engine = TransformersEngine(resolve_model(model, cache_directory()), context_length=context_length)
    anyio.run(functools.partial(serve, engine, host=host, port=port))
    return 0


@app.command()
@_told
def replay(
    files: Annotated[list[Path], typer.Argument(help="Recorded sessions: .jsonl, .jsonl.gz, .jsonl.zst.")],
    builder: Annotated[str, typer.Option(help="A builder's name or pkg.mod:Class.")] = "prefix_merging",
    as_json: Annotated[bool, typer.Option("--json", help="Print the traces as JSON, one line a session.")] = False,
) -> int:
    """Build the traces of recorded sessions again."""
    from .merge.check import check
    from .merge.traces import counts, trace_json
    from .recording import load

    for path in files:
        session = load(path).session
        chosen = plugins.create(builder, plugins.BUILDERS, "builder", {})
        policy = getattr(chosen, "policy", None)
        traces = chosen.build(session)
        check(traces, session, policy)
        told = counts(session, traces, policy)
        if as_json:
            typer.echo(json.dumps({"file": str(path), "counts": told, "traces": [trace_json(t) for t in traces]}))
            continue
        typer.echo(f"{path}: {len(traces)} traces of {told['completions']} completions")
        for number, trace in enumerate(traces):
            size = f"{len(trace.prompt_ids)} prompt + {len(trace.response_ids)} response tokens"
            typer.echo(f"  trace {number} ({trace.role}): {size}, {trace.trained} trained")
        reasons = {name: count for name, count in told.items() if name.startswith(("untrained_", "breaks_")) and count}
        typer.echo(f"  {json.dumps(reasons)}")
    return 0


@app.command()
@_told
def doctor(
    config: Annotated[Path, typer.Option(help="A RolloutConfig file, bare or under the key `polar`.")],
) -> int:
    """Check, before any training, that engine, renderer and sandbox do what exact rollouts need."""
    from .config import load_config
    from .doctor import examine

    findings = anyio.run(examine, load_config(config))
    for finding in findings:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        _console.print(f"[{colour}]{finding.level:<4}[/] {escape(f'{finding.what}: {finding.told}')}", highlight=False)
        if finding.remedy:
            _console.print(f"     -> {escape(finding.remedy)}", highlight=False)
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def main() -> None:
    app()
