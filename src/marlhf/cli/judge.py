"""Commands that compare responses: judge, annotate, agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marlhf.cli.app import Device, app, tell


@app.command("judge")
def judge(
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

    result = judging.judge(
        a,
        b,
        by,
        task=task,
        order=order,
        limit=limit,
        seed=seed,
        base_url=base_url,
        concurrency=concurrency,
        timeout=timeout,
        prices=judging.Prices(price_in, price_out),
        dry_run=dry_run,
        output=output,
        cache=cache,
        device=device,
        say=tell,
        progress=progress,
    )
    if result:
        typer.echo("\n".join(judging.describe(result)))
        typer.secho(f"verdicts: {result['path']}", bold=True, err=True)


@app.command("annotate")
def annotate(
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
        summaries = people.export_votes(
            runs, task=task, question=question, database=database, output=output, say=tell
        )
        for summary in summaries:
            typer.echo(f"{summary['judge']}: {describe(summary)[0]}")
        return
    people.annotate(
        runs,
        task=task,
        question=question,
        criteria=criterion or (),
        strength=strength,
        votes=votes,
        limit=limit,
        seed=seed,
        host=host,
        port=port,
        database=database,
        output=output,
        say=tell,
    )


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
    from marlhf.judge import agreement as agreeing

    typer.echo("\n".join(agreeing.describe(agreeing.agreement(files, seed=seed))))
