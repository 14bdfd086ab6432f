"""`polar-plugin`: the commands. Each parses, calls, prints; errors of ours end in one message and exit code 2."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, cast

import anyio
import typer
import yaml
from rich.console import Console
from rich.markup import escape

from .errors import ConfigError, PolarError

P = ParamSpec("P")
Form = Literal["text", "json", "html"]
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
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


harnesses = typer.Typer(no_args_is_help=True, help="Agent programs for sandboxes.")
app.add_typer(harnesses, name="harness")


@harnesses.command()
@_told
def install(
    names: Annotated[list[str], typer.Argument(help="NAME or NAME@VERSION, as in claude_code@2.1.332.")],
    root: Annotated[Path, typer.Option(help="The directory; runtime.harness_root names it.")],
) -> int:
    """Install agent programs from npm and PyPI into a directory that sandboxes see read-only; nothing is made twice."""
    from . import harness_root

    for one in [harness_root.wanted(name) for name in names]:
        if not one.tested:
            newest = harness_root.tested(one.harness)[1]
            told = f"{one.harness} {one.version} is untested; its preset was run with {newest}"
            Console(stderr=True).print(f"[yellow]warn[/] {escape(told)}", highlight=False)
        typer.echo(harness_root.install(one, root))
    return 0


FILES = typer.Argument(help="Recorded sessions (.jsonl, .jsonl.gz, .jsonl.zst), or directories of them.")
BUILDER = typer.Option(help="A builder's name or pkg.mod:Class; default: the expectation file's, or prefix_merging.")
CONFIG = typer.Option(help="The builder's configuration: YAML or JSON, or a file of it.")
TOKENIZER = typer.Option(help="A tokenizer's directory, to show text; default: the one that the recording names.")


@app.command()
@_told
def explain(
    files: Annotated[list[Path], FILES],
    session: Annotated[str | None, typer.Option(help="Only this session, by its id or file name.")] = None,
    form: Annotated[
        Form, typer.Option("--format", help="html is one page of its own: redirect it to a file.")
    ] = "text",
    tokenizer: Annotated[Path | None, TOKENIZER] = None,
    builder: Annotated[str, BUILDER] = "prefix_merging",
    config: Annotated[str, CONFIG] = "{}",
) -> int:
    """Show what became of each model call, and why each trace starts where it does."""
    from . import replayed
    from .merge import explain_html, explain_text
    from .merge.explain import as_json

    chosen = replayed.Builder(builder, _mapping(config))
    found = [replayed.replay(path, chosen, tokenizer) for path in replayed.files(files, session)]
    if form == "html":
        _echo(explain_html.page({str(one.path): one.explained() for one in found}, found[0].decoded_by))
    for one in found if form != "html" else ():
        told = one.explained()
        _echo(
            json.dumps({"file": str(one.path), **as_json(told)})
            if form == "json"
            else explain_text.text(told, one.decoded_by)
        )
    return 0


@app.command()
@_told
def replay(
    files: Annotated[list[Path], FILES],
    builder: Annotated[str | None, BUILDER] = None,
    config: Annotated[str | None, CONFIG] = None,
    against: Annotated[str | None, typer.Option(help="Another builder, to show what differs.")] = None,
    against_config: Annotated[str, typer.Option(help="The other builder's configuration.")] = "{}",
    expect: Annotated[Path | None, typer.Option(help="An expectation file; exit code 1 where it disagrees.")] = None,
    write_expect: Annotated[Path | None, typer.Option(help="Write what is found as an expectation file.")] = None,
    tokenizer: Annotated[Path | None, TOKENIZER] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the traces as JSON, one line a session.")] = False,
) -> int:
    """Build the traces of recorded sessions again, compare builders, and hold the result to what is expected."""
    from . import replayed

    if against and as_json:
        raise ConfigError("--against compares in words and --json prints traces: leave one out")
    if against_config != "{}" and not against:
        raise ConfigError("--against-config is the other builder's: give --against its name too")
    other = replayed.Builder(against, _mapping(against_config)) if against else None
    expectations = replayed.read_expectations(expect) if expect else None
    if expectations and builder is None:
        builder, config = expectations.builder, config or json.dumps(dict(expectations.config))
    chosen = replayed.Builder(builder or "prefix_merging", _mapping(config or "{}"))
    found = [replayed.replay(path, chosen, tokenizer) for path in replayed.files(files)]
    for one in found:
        typer.echo(replayed.traces_json(one) if as_json else replayed.summary(one))
        if other and not as_json:
            typer.echo(replayed.difference(one, other))
    if write_expect:
        replayed.write_expectations(write_expect, found, chosen)
    wrong = replayed.disagreements(found, expectations, str(expect)) if expectations else []
    for line in wrong:
        typer.echo(line, err=True)
    return 1 if wrong else 0


def _echo(text: str) -> None:
    """Print what recordings say: what moves a terminal's cursor, or is no character, is shown as an escape."""
    typer.echo(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _mapping(text: str) -> Mapping[str, Any]:
    """YAML or JSON, or a file of it. Raises ConfigError."""
    try:
        source = Path(text).read_text() if text.endswith((".yaml", ".yml", ".json")) else text
        data: object = yaml.safe_load(source)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {text!r} is neither YAML nor JSON nor a file of it: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"--config {text!r} must be a mapping, as in '{{max_trace_tokens: 32768}}'")
    return cast("Mapping[str, Any]", data)


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
