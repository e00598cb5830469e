"""Commands on finished runs: judge, annotate, agreement, report, watch, export, chat."""

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
    options_for,
    tell,
    write_report_of,
)

RunFolders = Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")]
ReportFile = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]
REPORT = Path("report.html")
Every = Annotated[float, typer.Option(min=1, help="Seconds between updates.")]


@app.command("judge")
def judge(
    context: typer.Context,
    a: Annotated[Path, typer.Argument(help="A run, or a JSON-lines file of responses.")],
    b: Annotated[Path, typer.Argument(help="What to compare it with.")],
    by: Annotated[
        str, typer.Option("--judge", help="openai:MODEL, reward:PATH, model:PATH, scores:NAME.")
    ],
    task: Annotated[str, typer.Option(help="Judging criteria: tldr, hh or webgpt.")] = "hh",
    base_url: Annotated[str | None, typer.Option(help="API server, ending in /v1.")] = None,
    order: Annotated[str, typer.Option(help="both (disagreement is a tie) or random.")] = "both",
    limit: Annotated[int | None, typer.Option(min=1, help="Number of prompts.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the cost.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a reply.")] = 120.0,
    price_in: Annotated[float | None, typer.Option(help="Per million input tokens.")] = None,
    price_out: Annotated[float | None, typer.Option(help="Per million output tokens.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random order.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Verdict file.")] = None,
    cache: Annotated[Path | None, typer.Option(help="File that caches replies.")] = None,
    device: Device = "auto",
) -> None:
    """Judge which of two models answers better. API judges read OPENAI_API_KEY."""
    from marlhf.judge import compare as judging

    def progress(done: int, total: int) -> None:
        if done == total or done % max(1, total // 20) == 0:
            tell(f"{done} of {total} questions")

    prices = judging.Prices(price_in, price_out)
    shown = {"say": tell, "progress": progress, "prices": prices}
    result = judging.judge(**options_for(context, judging.judge, **shown))
    if result:
        typer.echo("\n".join(judging.describe(result)))
        typer.secho(f"verdicts: {result['path']}", bold=True, err=True)


@app.command("annotate")
def annotate(
    context: typer.Context,
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Two or more runs or files of responses; or one, for pairs of its own."
        ),
    ],
    pick: Annotated[
        str, typer.Option(help="Pairs of one run: random, or active, where votes tell most.")
    ] = "random",
    reward: Annotated[
        list[str] | None,
        typer.Option(help="Reward model that --pick active asks; several disagree."),
    ] = None,
    pool: Annotated[int, typer.Option(min=1, help="Prompts to sample, of one run.")] = 512,
    retrain: Annotated[
        Path | None, typer.Option(help="Train this reward run again with the votes on one run.")
    ] = None,
    task: Annotated[str, typer.Option(help="Criteria: tldr, hh, webgpt, or a YAML file.")] = "hh",
    question: Annotated[str | None, typer.Option(help="Your own question for voters.")] = None,
    criterion: Annotated[
        list[str] | None, typer.Option(help="`Name: meaning`, with --question; may be repeated.")
    ] = None,
    strength: Annotated[bool, typer.Option("--strength", help="Ask how much better, too.")] = False,
    votes: Annotated[
        int | None, typer.Option(min=0, help="Votes per pair; 0 shows all pairs to everyone.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of prompts.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8123,
    seed: Annotated[int | None, typer.Option(help="Seed of order and sides.")] = None,
    database: Annotated[Path | None, typer.Option(help="File that stores votes.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Verdict folder.")] = None,
    export: Annotated[bool, typer.Option("--export", help="Only write verdicts.")] = False,
) -> None:
    """Serve a local web page where people compare responses blindly."""
    from marlhf.judge import annotate as people
    from marlhf.judge.annotate import pick as picking
    from marlhf.judge.compare import describe
    from marlhf.judge.pairs import JudgeError

    if len(runs) == 1 and retrain is not None:
        _retrain(retrain, picking.pairs_of(runs[0], database))
        return
    if retrain is not None or (len(runs) > 1 and (reward or pick == "active")):
        raise JudgeError("--retrain and --pick are for the votes on one run. Give one RUN.")
    if len(runs) == 1:
        folder = picking.open_pool(
            runs[0], pick, reward or (), pool=pool, count=limit or 64, seed=seed or 0, say=tell
        )
        runs, limit = [folder / name for name in picking.POOL], None
        database = database or folder / picking.VOTES
    if export:
        options = options_for(context, people.export_votes, database=database)
        for summary in people.export_votes(runs, **options, say=tell):
            typer.echo(f"{summary['judge']}: {describe(summary)[0]}")
        return
    options = options_for(context, people.annotate) | options_for(context, people.open_votes)
    options |= {"criteria": criterion or (), "limit": limit, "database": database}
    people.annotate(runs, **options, say=tell)


def _retrain(run: Path, pairs: Path) -> None:
    """Train a reward run again with votes, and say what they changed."""
    from marlhf.train.reward import compare, retrain

    after = retrain(run, pairs)
    old, new, change = compare(run, after)
    typer.echo(
        f"accuracy on held-out pairs of {change.size} prompts: {old:.3f} -> {new:.3f}, "
        f"difference {change.text('{:+.3f}'.format)}"
    )
    tell(str(after))


@app.command("agreement")
def agreement(
    files: Annotated[list[Path], typer.Argument(help="Verdict files, or runs that were judged.")],
    seed: Annotated[int, typer.Option(help="Bootstrap seed.")] = 0,
) -> None:
    """Measure how far judges agree on the same pairs, beyond chance."""
    from marlhf.judge import verdicts

    typer.echo("\n".join(verdicts.describe_agreement(verdicts.agreement(files, seed=seed))))


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
    context: typer.Context,
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
        from marlhf.evaluate.eval_plan import EvaluationOptions

        _play(runs, as_, options_for(context, EvaluationOptions))
        return

    from marlhf.chat.models import load_chat_models
    from marlhf.chat.terminal import converse
    from marlhf.models.base import pick_device

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ctrl-C only interrupts a response here
    options = options_for(context, load_chat_models, device=pick_device(device))
    if converse(load_chat_models(runs, **options), seed=seed):
        raise typer.Exit(1)


def _play(runs: list[str], as_: str | None, options: dict[str, Any]) -> None:
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
    chosen = EvaluationOptions(prompts=64, reference="none", **options)
    play_at_terminal(runs[0], chosen, as_world=as_ == "world")
