"""Commands that measure and compare what was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marlhf.cli.app import (
    DataPath,
    Device,
    Like,
    MaxNewTokens,
    SampleSeed,
    Several,
    Source,
    Split,
    TrustCode,
    app,
    read_segmenter,
    tell,
    watch_report_of,
    write_report_of,
)

if TYPE_CHECKING:
    from marlhf.evaluate.eval_plan import EvaluationOptions

HELD_OUT_DATA = "These are held-out prompts: what learns from them cannot be evaluated on them."


@app.command("pass-at-k", cls=Several)
def pass_at_k(
    run: Annotated[Path, typer.Argument(help="A run folder with a finished model.")],
    k: Annotated[list[int] | None, typer.Option(help="One or more, as in --k 1 5.")] = None,
    samples: Annotated[int | None, typer.Option(help="A problem; 10 unless given.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only so many problems.")] = None,
    temperature: Annotated[float | None, typer.Option(help="The run's unless given.")] = None,
    max_new_tokens: MaxNewTokens = None,
    source: Source = None,
    path: DataPath = None,
    split: Split = None,
    seconds: Annotated[float, typer.Option(help="For a program on one test.")] = 4.0,
    seed: SampleSeed = 0,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Share of programming problems that k samples solve, by unit tests."""
    from marlhf.evaluate.pass_at_k import PassAtKOptions, measure
    from marlhf.evaluate.pass_rates import read_row
    from marlhf.reward.code import UnitTests

    ks = tuple(sorted({*(k or (1, 5))}))
    options = PassAtKOptions(
        k=ks,
        samples=max(10, *ks) if samples is None else samples,
        prompts=prompts or PassAtKOptions.prompts,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        source=source,
        path=path,
        split=split,
        seed=seed,
        device=device,
        trust_code=trust_code,
    )

    def progress(done: int, total: int) -> None:
        tell(f"{done} of {total} problems")

    result = measure(run, options, UnitTests(seconds=seconds), progress)
    for row in map(read_row, result["rows"]):
        shown = "  ".join(
            f"pass@{k} {100 * rate.mean:5.2f} {rate.bounds(lambda x: f'{100 * x:.2f}')}"
            for k, rate in row.pass_at.items()
        )
        typer.echo(f"{row.difficulty:14} {row.problems:5} problems  {shown}")
    if result["without_verdict"]:
        tell(f"{result['without_verdict']} problems have no verdict: see the log")


@app.command("credit", cls=Several)
def credit(
    run: Annotated[Path, typer.Argument(help="The folder of a PPO run, finished or not.")],
    rules: Annotated[
        list[str] | None,
        typer.Option("--rule", help="One or more, as in --rule 'ngram n=5 lam=0.95'."),
    ] = None,
    batches: Annotated[int, typer.Option(help="Batches to compare on.")] = 24,
    where: Annotated[
        bool, typer.Option("--where", help="Continue responses to see where credit falls.")
    ] = False,
    responses: Annotated[int, typer.Option(help="With --where: responses to look at.")] = 12,
    continuations: Annotated[int, typer.Option(help="With --where: from each action.")] = 8,
    step: Annotated[int | None, typer.Option(help="A step that was saved; the last.")] = None,
    seed: SampleSeed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """How good a run's credit is, and which rule and lambda would be better."""
    import json

    from marlhf.config.candidates import parse_candidates

    parse_candidates(tuple(rules or ()))  # a typo is reported before torch loads
    from marlhf.credit.measure import measure, open_state, table, verdict
    from marlhf.credit.true_credit import locate
    from marlhf.credit.true_credit import table as where_table
    from marlhf.runs.atomic import write_json
    from marlhf.runs.layout import CREDIT

    state = open_state(run, step=step, device=device, trust_code=trust_code)
    measured = measure(state, tuple(rules or ()), batches=batches, seed=seed)
    summary: dict[str, Any] = {"step": state.step, "seed": seed} | measured.summary()
    if where:
        summary["where"] = locate(
            state,
            tuple(rules or ()),
            responses=responses,
            continuations=continuations,
            seed=seed,
        )
    write_json(run / CREDIT, summary)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
        return
    typer.echo(table(measured))
    typer.echo(verdict(measured))
    if where:
        typer.echo("\n" + where_table(summary["where"]))
    tell(f"{run / CREDIT}; marlhf report shows it")


@app.command("evaluate", cls=Several)
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Runs, folders of them, or model folders.")],
    prompts: Annotated[int, typer.Option(help="Held-out prompts to ask.")] = 2000,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="One or more: a model's folder, a run, module:function. The run's own."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="The run's unless given.")] = None,
    max_new_tokens: MaxNewTokens = None,
    seed: SampleSeed = 0,
    reference: Annotated[
        str | None, typer.Option(help="What KL is measured to, or none. The run's own.")
    ] = None,
    like: Like = None,
    source: Source = None,
    path: DataPath = None,
    split: Split = None,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Score responses to held-out prompts, of any model by any reward models."""
    from marlhf.evaluate.eval_plan import EvaluationOptions
    from marlhf.evaluate.held_out import data_tables, summary_table
    from marlhf.evaluate.score import evaluate

    options = EvaluationOptions(
        prompts=prompts,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        rewards=tuple(reward or ()),
        reference=reference,
        like=like,
        source=source,
        path=path,
        split=split,
        device=device,
        trust_code=trust_code,
    )
    scored = evaluate(runs, options, tell)
    typer.echo(summary_table([(each.name, each.summary) for each in scored]))
    for table in data_tables([(each.name, each.folder) for each in scored], scored[0].settings):
        typer.echo(f"\n{table}")
    for each in scored:
        tell(str(each.file))


@app.command("best-of-n", cls=Several)
def best_of_n(
    run: Annotated[Path, typer.Argument(help="A run, or a model folder.")],
    n: Annotated[list[int] | None, typer.Option(help="As in --n 4 8 16 32.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="As in --temperature 0.4 0.8. The run's own.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts to ask.")] = 200,
    reward: Annotated[
        str | None, typer.Option(help="What chooses, as for evaluate. The run's own.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the best responses here, as data for SFT.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="Decide block by block: 'ngram n=12', lines, words ...")
    ] = None,
    k: Annotated[list[int] | None, typer.Option(help="Candidates for each block; 4.")] = None,
    value: Annotated[
        str | None, typer.Option(help="What chooses a block: reward, critic or monte_carlo.")
    ] = None,
    continuations: Annotated[
        int, typer.Option(help="Of each candidate, for --value monte_carlo.")
    ] = 4,
    write: Annotated[
        Path | None, typer.Option(help="Write the responses of --blocks here, as data for SFT.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Ask training prompts instead.")] = False,
    max_new_tokens: MaxNewTokens = None,
    seed: SampleSeed = 0,
    like: Like = None,
    source: Source = None,
    path: DataPath = None,
    split: Split = None,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """What the best of n samples scores, or the best of k at every block of a response."""
    from marlhf.evaluate import best_of_n as sampler
    from marlhf.evaluate.best_of_n_grid import grid_table
    from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions

    options = EvaluationOptions(
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        rewards=(reward,) if reward else (),
        like=like,
        source=source,
        path=path,
        split=split,
        train=train,
        device=device,
        trust_code=trust_code,
    )
    held_out = not (train or source or path or split)
    if blocks is not None:
        if export or len(temperature or ()) > 1:
            raise EvaluationError("With --blocks, give one --temperature, and --write FILE.")
        options = replace(options, temperature=temperature[0] if temperature else None)
        rule = read_segmenter(blocks, "--blocks")
        _best_of_blocks(
            run, options, rule, blocks, n, k or [4], value or "reward", continuations, write
        )
        if write and held_out:
            tell(HELD_OUT_DATA)
        return
    if k or value or write:
        raise EvaluationError("--k, --value and --write belong to --blocks, as in 'ngram n=12'.")
    sampled = sampler.best_of_n(run, options, n or (4, 8, 16, 32), temperature or (), tell)
    typer.echo(grid_table(sampled))
    if export is None:
        return
    best, kept, left = sampler.export(sampled, export)
    tell(f"{export}: {kept} rows at temperature {best:g}; {left} cut off or empty left out")
    if held_out:
        tell(HELD_OUT_DATA)


def _best_of_blocks(
    run: Path,
    options: EvaluationOptions,
    rule: Any,
    label: str,
    ns: list[int] | None,
    ks: list[int],
    value: Any,
    continuations: int,
    write: Path | None,
) -> None:
    """Decide block by block, and show the frontier beside that of whole responses."""
    from marlhf.evaluate.best_of_n import best_of_n as sample_whole
    from marlhf.evaluate.blocks import BlockOptions, best_of_blocks, write_responses
    from marlhf.evaluate.blocks_frontier import frontier_table, whole_points

    chosen = BlockOptions(rule, label, tuple(ks), value, continuations)
    results = best_of_blocks(run, options, chosen, tell)
    temperature = results[0].settings.temperature
    grid = sample_whole(run, options, ns or (1, 4, 16), [temperature], tell)
    points = [each.point() for each in results] + whole_points(grid, temperature)
    typer.echo(frontier_table(sorted(points, key=lambda point: point.kl_bound)))
    if write is not None:
        k, kept, left = write_responses(results, write)
        tell(f"{write}: {kept} rows of k = {k}; {left} cut off or empty left out")


@app.command("judge")
def judge(
    a: Annotated[Path, typer.Argument(help="A run, or a JSON-lines file of responses.")],
    b: Annotated[Path, typer.Argument(help="What it is compared with.")],
    by: Annotated[
        str, typer.Option("--judge", help="openai:MODEL, reward:PATH, model:PATH, scores:NAME.")
    ],
    task: Annotated[str, typer.Option(help="Whose criteria: tldr, hh or webgpt.")] = "hh",
    base_url: Annotated[str | None, typer.Option(help="Another server, ending in /v1.")] = None,
    order: Annotated[str, typer.Option(help="both (to disagree is a tie) or random.")] = "both",
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Estimate tokens and cost.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions at a time.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a reply.")] = 120.0,
    price_in: Annotated[float | None, typer.Option(help="Per million tokens sent.")] = None,
    price_out: Annotated[float | None, typer.Option(help="Per million tokens received.")] = None,
    seed: Annotated[int, typer.Option(help="Of random orders.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Verdicts.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where replies are kept.")] = None,
    device: Device = "auto",
) -> None:
    """Which of two models answers better, prompt by prompt; the key is in OPENAI_API_KEY."""
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
        list[Path], typer.Argument(help="Two or more: runs, or JSON-lines files of responses.")
    ],
    task: Annotated[str, typer.Option(help="Criteria: tldr, hh, webgpt, or a YAML file.")] = "hh",
    question: Annotated[str | None, typer.Option(help="A question of your own.")] = None,
    criterion: Annotated[
        list[str] | None, typer.Option(help="With --question: `Name: meaning`; may be repeated.")
    ] = None,
    strength: Annotated[
        bool, typer.Option("--strength", help="People may say how much better.")
    ] = False,
    votes: Annotated[
        int | None, typer.Option(min=0, help="People on each pair; 0 for everyone on all.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; with a token unless it is this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8123,
    seed: Annotated[int | None, typer.Option(help="Of order and sides; drawn if left out.")] = None,
    database: Annotated[Path | None, typer.Option(help="Where votes are kept.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder.")] = None,
    export: Annotated[bool, typer.Option("--export", help="Write verdicts, no page.")] = False,
) -> None:
    """A local web page on which people compare responses, blind."""
    from marlhf.judge import annotate as people
    from marlhf.judge.compare import describe

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


@app.command("agreement")
def agreement(
    files: Annotated[list[Path], typer.Argument(help="Verdict files, or runs that were judged.")],
    seed: Annotated[int, typer.Option(help="Of the intervals.")] = 0,
) -> None:
    """How far judges agree on the same pairs, beyond chance."""
    from marlhf.judge import agreement as agreeing

    typer.echo("\n".join(agreeing.describe(agreeing.agreement(files, seed=seed))))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write.")] = Path(
        "report.html"
    ),
    watch: Annotated[
        bool, typer.Option("--watch", help="Write it again until the runs end; the page reloads.")
    ] = False,
    every: Annotated[float, typer.Option(min=1, help="Seconds between two, with --watch.")] = 30.0,
) -> None:
    """One HTML file that compares runs."""
    if watch:
        watch_report_of(runs, output, every)
    else:
        write_report_of(runs, output)
