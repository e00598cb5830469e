"""Commands on finished runs: pass-at-k, credit, evaluate, best-of-n, judge, annotate, agreement,
report, watch, export, chat."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from marlhf.cli.app import (
    DataPath,
    Device,
    EnvironmentName,
    Like,
    MaxNewTokens,
    MultiValueCommand,
    SampleSeed,
    Source,
    Split,
    Temperature,
    TrustCode,
    app,
    read_segmenter,
    tell,
    write_report_of,
)

if TYPE_CHECKING:
    from marlhf.evaluate.blocks import BlockOptions
    from marlhf.evaluate.eval_plan import EvaluationOptions

RunFolders = Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")]
ReportFile = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]
REPORT = Path("report.html")
Every = Annotated[float, typer.Option(min=1, help="Seconds between updates.")]

Combine = Annotated[
    str | None,
    typer.Option(help="Scores of an ensemble: mean, min, 'mean - 2 std' (default: the run's)."),
]

HELD_OUT_DATA = "These are held-out prompts: a model trained on them cannot be evaluated on them."


@app.command("pass-at-k", cls=MultiValueCommand)
def pass_at_k(
    run: Annotated[Path, typer.Argument(help="A run folder with a finished model.")],
    k: Annotated[list[int] | None, typer.Option(help="As in --k 1 5 (the default).")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples per problem (default 10).")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of problems.")] = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    source: Source = None,
    path: DataPath = None,
    split: Split = None,
    seconds: Annotated[float, typer.Option(help="Time limit of a program on one test.")] = 4.0,
    seed: SampleSeed = 0,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Measure pass@k: the share of programming problems solved by one of k samples."""
    from marlhf.evaluate.pass_at_k import PassAtKOptions, measure
    from marlhf.evaluate.results import read_row
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


@app.command("credit", cls=MultiValueCommand)
def credit(
    run: Annotated[Path, typer.Argument(help="The folder of a PPO run, finished or not.")],
    rules: Annotated[
        list[str] | None,
        typer.Option("--rule", help="Rules or presets to compare: 'ngram n=5 lam=0.95', vineppo."),
    ] = None,
    batches: Annotated[int, typer.Option(help="Number of batches to measure on.")] = 24,
    where: Annotated[
        bool,
        typer.Option("--where", help="Resample continuations to see where credit falls."),
    ] = False,
    headroom: Annotated[
        bool,
        typer.Option("--headroom", help="Measure how much any credit could win (PPO, RLOO)."),
    ] = False,
    responses: Annotated[
        int | None, typer.Option(help="Responses for --where (12) or --headroom (128).")
    ] = None,
    continuations: Annotated[
        int, typer.Option(help="Continuations per action (--where, --headroom).")
    ] = 8,
    boundaries: Annotated[
        int, typer.Option(help="Most actions per response to continue from (--headroom).")
    ] = 24,
    step: Annotated[int | None, typer.Option(help="Checkpoint step (default: the last).")] = None,
    seed: SampleSeed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Measure a run's credit assignment, and which rule and lambda would do better."""
    import json

    from marlhf.config.candidates import parse_candidates
    from marlhf.config.presets import PRESETS

    without_presets = tuple(rule for rule in rules or () if rule not in PRESETS)
    parse_candidates(without_presets)  # a typo is reported before torch loads
    from marlhf.credit.measure import critic_verdict, limits, measure, table, verdict
    from marlhf.credit.state import open_state
    from marlhf.credit.true_credit import locate
    from marlhf.credit.true_credit import table as where_table
    from marlhf.runs.atomic import write_json
    from marlhf.runs.layout import CREDIT, HEADROOM

    options: dict[str, Any] = {"step": step, "device": device, "trust_code": trust_code}
    if headroom:
        from marlhf.credit import headroom as of_run
        from marlhf.runs.jsonl import finite

        state = open_state(run, **options, without_critic=True)
        result = {"step": state.step, "seed": seed} | of_run.measure_headroom(
            state,
            tuple(rules or ()),
            responses=128 if responses is None else responses,
            continuations=continuations,
            boundaries=boundaries,
            seed=seed,
        )
        write_json(run / HEADROOM, finite(result))
        shown = [of_run.table(result), result["verdict"]]
        typer.echo(json.dumps(finite(result), indent=1) if as_json else "\n".join(shown))
        tell(f"{run / HEADROOM}; marlhf report shows it")
        return
    state = open_state(run, **options)
    measured = measure(state, tuple(rules or ()), batches=batches, seed=seed)
    summary: dict[str, Any] = {"step": state.step, "seed": seed} | measured.summary()
    if where:
        summary["where"] = locate(
            state,
            without_presets,
            responses=12 if responses is None else responses,
            continuations=continuations,
            seed=seed,
        )
    write_json(run / CREDIT, summary)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
        return
    typer.echo(table(measured))
    typer.echo(verdict(measured))
    typer.echo(limits(measured))
    typer.echo(critic_verdict(measured))
    if where:
        typer.echo("\n" + where_table(summary["where"]))
    tell(f"{run / CREDIT}; marlhf report shows it")


@app.command("evaluate", cls=MultiValueCommand)
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Runs, folders of them, or model folders.")],
    prompts: Annotated[int, typer.Option(help="Number of held-out prompts.")] = 2000,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="Model folders, runs or module:function; may be repeated (default: the run's)."
        ),
    ] = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: SampleSeed = 0,
    reference: Annotated[
        str | None, typer.Option(help="Model for KL, or none (default: the run's).")
    ] = None,
    like: Like = None,
    source: Source = None,
    path: DataPath = None,
    split: Split = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS", help="Run these tasks of lm-eval instead, as in gsm8k,ifeval."
        ),
    ] = None,
    rewardbench: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Test reward models on RewardBench: a file, or its hub name."
        ),
    ] = None,
    combine: Combine = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --rewardbench, as JSON.")] = False,
    environment: EnvironmentName = None,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Score responses to held-out prompts, with any model and any reward models."""
    if rewardbench is not None:
        import json

        from marlhf.evaluate import rewardbench as benchmark

        options = {"combine": combine or "mean", "device": device, "trust_code": trust_code}
        for run in runs:
            result = benchmark.rewardbench(str(run), rewardbench, **options)
            typer.echo(json.dumps(result) if as_json else f"{run}\n{benchmark.describe(result)}")
        return
    if lm_eval is not None:
        from marlhf.evaluate.benchmarks import lm_eval_command, run_lm_eval

        for run in runs:
            command = lm_eval_command(run, lm_eval, device=device, seed=seed, trust_code=trust_code)
            run_lm_eval(command)
        return
    from marlhf.evaluate.eval_plan import EvaluationOptions
    from marlhf.evaluate.results import data_tables, summary_table
    from marlhf.evaluate.score import evaluate

    options = EvaluationOptions(
        prompts=prompts,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        rewards=tuple(reward or ()),
        combine=combine,
        reference=reference,
        like=like,
        source=source,
        path=path,
        split=split,
        environment=environment,
        device=device,
        trust_code=trust_code,
    )
    scored = evaluate(runs, options, tell)
    typer.echo(summary_table([(each.name, each.summary) for each in scored]))
    for table in data_tables([(each.name, each.folder) for each in scored], scored[0].settings):
        typer.echo(f"\n{table}")
    for each in scored:
        tell(str(each.file))


@app.command("best-of-n", cls=MultiValueCommand)
def best_of_n(
    run: Annotated[Path, typer.Argument(help="A run, or a model folder.")],
    n: Annotated[list[int] | None, typer.Option(help="Default: --n 4 8 16 32.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="As in --temperature 0.4 0.8 (default: the run's).")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Number of held-out prompts.")] = 200,
    reward: Annotated[
        str | None, typer.Option(help="What selects, as for evaluate (default: the run's).")
    ] = None,
    combine: Combine = None,
    export: Annotated[
        Path | None, typer.Option(help="Save the best responses here, as data for SFT.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="Select block by block: 'ngram n=12', lines, words ...")
    ] = None,
    k: Annotated[list[int] | None, typer.Option(help="Candidates per block (default: 4).")] = None,
    value: Annotated[
        str | None,
        typer.Option(help="Value of a block: reward (default), critic, monte_carlo."),
    ] = None,
    continuations: Annotated[
        int, typer.Option(help="Continuations per candidate with --value monte_carlo.")
    ] = 4,
    write: Annotated[
        Path | None, typer.Option(help="Save the responses of --blocks here, as data for SFT.")
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Use training prompts.")] = False,
    max_new_tokens: MaxNewTokens = None,
    seed: SampleSeed = 0,
    like: Like = None,
    source: Source = None,
    path: DataPath = None,
    split: Split = None,
    environment: EnvironmentName = None,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Score the best of n samples, or the best of k at each block of a response."""
    from marlhf.evaluate import best_of_n as sampler
    from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions
    from marlhf.evaluate.results import grid_table

    options = EvaluationOptions(
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        rewards=(reward,) if reward else (),
        combine=combine,
        like=like,
        source=source,
        path=path,
        split=split,
        environment=environment,
        train=train,
        device=device,
        trust_code=trust_code,
    )
    held_out = not (train or source or path or split)
    if blocks is not None:
        if export or len(temperature or ()) > 1:
            raise EvaluationError("With --blocks, give one --temperature, and --write FILE.")
        options = replace(options, temperature=temperature[0] if temperature else None)
        from marlhf.evaluate.blocks import BlockOptions

        rule, chosen_by = read_segmenter(blocks, "--blocks"), cast(Any, value or "reward")
        deciding = BlockOptions(rule, blocks, tuple(k or [4]), chosen_by, continuations)
        _best_of_blocks(run, options, deciding, n or [1, 4, 16], write)
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
    run: Path, options: EvaluationOptions, blocks: BlockOptions, ns: list[int], write: Path | None
) -> None:
    """Select block by block, and compare with best-of-n over whole responses."""
    from marlhf.evaluate.best_of_n import best_of_n as sample_whole
    from marlhf.evaluate.blocks import best_of_blocks, write_responses
    from marlhf.evaluate.results import frontier_table, whole_points

    results = best_of_blocks(run, options, blocks, tell)
    temperature = results[0].settings.temperature
    grid = sample_whole(run, options, ns, [temperature], tell)
    points = [each.point() for each in results] + whole_points(grid, temperature)
    typer.echo(frontier_table(sorted(points, key=lambda point: point.kl_bound)))
    if write is not None:
        k, kept, left = write_responses(results, write)
        tell(f"{write}: {kept} rows of k = {k}; {left} cut off or empty left out")


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
    from marlhf.train.retrain import compare, retrain

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
    from marlhf.runtime.export import export_plain, gguf_advice

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

    from marlhf.chat.play import play_at_terminal
    from marlhf.evaluate.eval_plan import EvaluationError, EvaluationOptions

    if as_ not in (None, "world"):
        raise EvaluationError(f"There is no --as {as_}. The only choice is world.")
    if len(runs) != 1:
        raise EvaluationError(f"Give one run to converse with an environment, not {len(runs)}.")
    for end in (signal.SIGINT, signal.SIGTERM):  # a thread may wait for a line
        signal.signal(end, signal.SIG_DFL)
    chosen = EvaluationOptions(prompts=64, environment=environment, reference="none", **options)
    play_at_terminal(runs[0], chosen, as_world=as_ == "world")
