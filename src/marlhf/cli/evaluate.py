"""Commands that measure: pass-at-k, credit, evaluate, best-of-n."""

from __future__ import annotations

from dataclasses import replace
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
    options_for,
    read_segmenter,
    tell,
)

if TYPE_CHECKING:
    from marlhf.evaluate.blocks import BlockOptions
    from marlhf.evaluate.eval_plan import EvaluationOptions

Combine = Annotated[
    str | None,
    typer.Option(help="Scores of an ensemble: mean, min, 'mean - 2 std' (default: the run's)."),
]

HELD_OUT_DATA = "These are held-out prompts: a model trained on them cannot be evaluated on them."


@app.command("pass-at-k", cls=MultiValueCommand)
def pass_at_k(
    context: typer.Context,
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
    samples = max(10, *ks) if samples is None else samples
    options = options_for(context, PassAtKOptions, k=ks, samples=samples)

    def progress(done: int, total: int) -> None:
        tell(f"{done} of {total} problems")

    result = measure(run, PassAtKOptions(**options), UnitTests(seconds=seconds), progress)
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
    context: typer.Context,
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
    learn_cuts: Annotated[
        bool,
        typer.Option("--learn-cuts", help="Learn where to cut, on as many batches again."),
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

    from marlhf.config.candidates import parse_candidates, presets

    without_presets = tuple(rule for rule in rules or () if rule not in presets())
    parse_candidates(without_presets)  # a typo is reported before torch loads
    from marlhf.credit import cuts
    from marlhf.credit.measure import critic_verdict, limits, measure, table, verdict
    from marlhf.credit.state import open_state
    from marlhf.credit.true_credit import locate
    from marlhf.credit.true_credit import table as where_table
    from marlhf.runs.atomic import write_json
    from marlhf.runs.layout import CREDIT, HEADROOM

    state = open_state(run, **options_for(context, open_state), without_critic=headroom)
    summary: dict[str, Any] = {"step": state.step, "seed": seed}
    chosen = tuple(rules or ())
    if headroom:
        from marlhf.credit import headroom as of_run
        from marlhf.runs.atomic import finite

        options = options_for(context, of_run.measure_headroom, rules=chosen)
        result = summary | of_run.measure_headroom(state, **options)
        shown = [of_run.table(result), result["verdict"]]
        file, summary = run / HEADROOM, finite(result)
    else:
        learned = cuts.learn_cuts(state, batches=batches, seed=seed) if learn_cuts else None
        more = [learned.way, *learned.twins] if learned else []
        measured = measure(state, **options_for(context, measure, rules=chosen, more=more))
        summary |= measured.summary()
        shown = [table(measured), verdict(measured), limits(measured)]
        if learned:
            summary["learned_cuts"] = cuts.verdict(learned, measured)
            shown.append(summary["learned_cuts"])
        shown.append(critic_verdict(measured))
        if where:
            options = options_for(context, locate, rules=without_presets)
            summary["where"] = locate(state, **options)
            shown.append("\n" + where_table(summary["where"]))
        file = run / CREDIT
    write_json(file, summary)
    typer.echo(json.dumps(summary, indent=1) if as_json else "\n".join(shown))
    if headroom or not as_json:
        tell(f"{file}; marlhf report shows it")


@app.command("evaluate", cls=MultiValueCommand)
def evaluate(
    context: typer.Context,
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

        from marlhf.evaluate import benchmarks

        for run in runs:
            options = options_for(
                context, benchmarks.rewardbench, reward=str(run), path=rewardbench
            )
            result = benchmarks.rewardbench(**options)
            typer.echo(json.dumps(result) if as_json else f"{run}\n{benchmarks.describe(result)}")
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

    chosen = options_for(context, EvaluationOptions, rewards=tuple(reward or ()))
    options = EvaluationOptions(**chosen)
    scored = evaluate(runs, options, tell)
    typer.echo(summary_table([(each.name, each.summary) for each in scored]))
    for table in data_tables([(each.name, each.folder) for each in scored], scored[0].settings):
        typer.echo(f"\n{table}")
    for each in scored:
        tell(str(each.file))


@app.command("best-of-n", cls=MultiValueCommand)
def best_of_n(
    context: typer.Context,
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

    rewards = (reward,) if reward else ()
    chosen = options_for(context, EvaluationOptions, rewards=rewards, temperature=None)
    options = EvaluationOptions(**chosen)
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
