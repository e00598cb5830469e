"""Commands on finished runs: report, watch, export, chat."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from marlhf.cli.app import (
    Device,
    MaxNewTokens,
    SampleSeed,
    Temperature,
    TrustCode,
    app,
    tell,
    write_report_of,
)

RunFolders = Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")]
ReportFile = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]
REPORT = Path("report.html")
Every = Annotated[float, typer.Option(min=1, help="Seconds between updates.")]


@app.command()
def report(
    runs: RunFolders,
    output: ReportFile = REPORT,
    watch: Annotated[
        bool, typer.Option("--watch", help="Update the page until the runs end.")
    ] = False,
    every: Every = 30.0,
) -> None:
    """Write one HTML page that compares runs."""
    if watch:
        watch_runs(runs, output, every)
    else:
        write_report_of(runs, output)


@app.command("watch")
def watch_runs(runs: RunFolders, output: ReportFile = REPORT, every: Every = 30.0) -> None:
    """Write the report of runs that are training, and update it until they end."""
    from marlhf.report.write import watch_report

    for number, written in enumerate(watch_report(runs, output, every=every)):
        if number == 0:
            typer.secho(f"report: {written}", bold=True, err=True)
            tell(f"Updated every {every:g} s until the runs end, or until Ctrl-C.")
    tell("All runs have ended.")


class ExportFormat(StrEnum):
    """Who is to load the model."""

    vllm = "vllm"
    gguf = "gguf"


@app.command("export")
def export_model(
    run: Annotated[Path, typer.Argument(help="A run with a finished model, or a model folder.")],
    to: Annotated[ExportFormat, typer.Option(help="What is to load it.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder (default: beside RUN).")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Save a model as one plain folder, adapters merged, and check that it loads."""
    from marlhf.runs.layout import RunError
    from marlhf.runtime.publish import export_plain, gguf_advice

    folder = output or run.absolute().with_name(f"{run.absolute().name}-{to.value}")
    export_plain(run, folder, trust_code=trust_code)
    if to is ExportFormat.gguf:
        raise RunError(gguf_advice(folder))
    typer.echo(str(folder))
    tell(f"next: vllm serve {folder}")


@app.command()
def chat(
    runs: Annotated[
        list[str], typer.Argument(help="Runs, folders of them, model folders, or hub names.")
    ],
    form: Annotated[
        str, typer.Option(help="Prompt format: chat, hh, webgpt, tldr, apps, text.")
    ] = "auto",
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: SampleSeed = 0,
    environment: Annotated[
        str | None, typer.Option(help="Watch the model play in it: guess, python, my_module:Class.")
    ] = None,
    as_: Annotated[
        str | None, typer.Option("--as", help="world: answer in place of the environment.")
    ] = None,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Chat with one or more models side by side; prompts may be piped in."""
    import signal

    if environment is not None or as_ is not None:
        options = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
        _play(runs, environment, as_, device=device, trust_code=trust_code, **options)
        return

    from marlhf.chat.models import load_chat_models
    from marlhf.chat.terminal import converse
    from marlhf.models.base import pick_device

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ctrl-C only interrupts a response here
    chat_models = load_chat_models(
        runs,
        pick_device(device),
        form=form,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        trust_code=trust_code,
    )
    if converse(chat_models, seed=seed):
        raise typer.Exit(1)


def _play(runs: list[str], environment: str | None, as_: str | None, **options: Any) -> None:
    """Watch a model converse with an environment, or answer as the world."""
    import signal

    from marlhf.chat.terminal import play_at_terminal
    from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions

    if as_ not in (None, "world"):
        raise EvaluationError(f"There is no --as {as_}. The only choice is world.")
    if len(runs) != 1:
        raise EvaluationError(f"Give one run to converse with an environment, not {len(runs)}.")
    for end in (signal.SIGINT, signal.SIGTERM):  # a thread may wait for a line
        signal.signal(end, signal.SIG_DFL)
    chosen = EvaluationOptions(prompts=64, environment=environment, reference="none", **options)
    play_at_terminal(runs[0], chosen, as_world=as_ == "world")
