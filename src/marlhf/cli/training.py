"""Commands that train: the stages, and whole recipes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from marlhf.cli.app import (
    Device,
    Like,
    MaxNewTokens,
    Overrides,
    Recipe,
    SampleSeed,
    StageName,
    TrustCode,
    app,
    fail,
    main_rank,
    read_segmenter,
    tell,
    write_report_of,
)
from marlhf.cli.lean_imports import skip_unused_packages
from marlhf.runs.stage_facts import facts_of
from marlhf.train.stages import METHODS

if TYPE_CHECKING:
    from marlhf.train.recipe import Stage

LEFT = 75
"""Exit status of a sweep that its deadline ended: try again later, as in sysexits.h."""


def _add_command(kind: str, help_: str) -> None:
    def command(recipe: Recipe, overrides: Overrides = None, stage: StageName = None) -> None:
        from marlhf.train.recipe import check_stage, make_segmenters

        checked = check_stage(recipe, kind, overrides, stage)  # torch is not needed for that
        tell(f"{recipe}: {checked.name} in {checked.config.output_dir}")
        with _quick_start([checked]):
            _train(make_segmenters([checked])[0])

    app.command(kind, help=help_)(command)


for name, method in METHODS.items():
    _add_command(name, method.help)


@app.command("run")
def run_all(recipe: Recipe, overrides: Overrides = None) -> None:
    """All stages of a recipe in order, skipping finished ones, then the report."""
    from marlhf.train.recipe import check_recipe, make_segmenters

    stages = check_recipe(recipe, overrides)  # a typo is reported before torch loads
    root = Path(stages[0].config.output_dir).parent
    tell(f"{recipe}: {', '.join(stage.name for stage in stages)} in {root}")
    with _quick_start(stages):
        stages = make_segmenters(stages)
        _train_all(stages)
    if main_rank():
        write_report_of([root], root / "report.html")
        typer.echo(_results(stages))
        policies = [s.config.output_dir for s in stages if facts_of(s.kind).samples]
        pair = " ".join(policies[-2:])
        tell(f"next: marlhf chat {pair or root}")
        if len(policies) > 1:
            tell(f"      marlhf judge {pair} --judge openai:MODEL")


@contextlib.contextmanager
def _quick_start(stages: list[Stage]) -> Iterator[None]:
    """Torch and transformers are imported in here, with nothing that can wait."""
    configs: list[Any] = [stage.config for stage in stages]
    # Code of others may be about images as well, and use transformers for that.
    if not any(c.trust_remote_code or getattr(c, "reward_funcs", ()) for c in configs):
        skip_unused_packages()
    yield


def _train_all(stages: list[Stage]) -> None:
    from marlhf.runtime.progress import stages_ahead
    from marlhf.train.preflight import check_stages

    check_stages(stages)
    try:
        for number, stage in enumerate(stages, start=1):
            tell(f"[{number}/{len(stages)}] {stage.name}", bold=True)
            stages_ahead.begin(stage.kind, [(s.kind, s.config.num_steps) for s in stages[number:]])
            _train(stage)
    finally:
        stages_ahead.begin("", [])


def _results(stages: list[Stage]) -> str:
    """The last held-out numbers of each stage."""
    from marlhf.evaluate.text_table import text_table
    from marlhf.runs.layout import read_state

    names = {"score": "score", "gold": "gold", "kl": "KL", "length": "length"}
    names |= {"win_rate": "win rate", "accuracy": "accuracy", "loss": "loss"}
    summaries = [read_state(Path(s.config.output_dir)).get("summary", {}) for s in stages]
    columns = [key for key in names if any(f"eval/{key}" in summary for summary in summaries)]
    rows = [
        [stage.name, *(_number(summary.get(f"eval/{key}")) for key in columns)]
        for stage, summary in zip(stages, summaries)
    ]
    return text_table(["held out", *(names[key] for key in columns)], rows)


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else "-"


@app.command("sweep")
def run_sweep(
    recipe: Recipe,
    overrides: Overrides = None,
    jobs: Annotated[int, typer.Option(help="Trainings at a time.")] = 1,
    deadline: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Save and end in so many minutes.")
    ] = None,
    only: Annotated[str, typer.Option(help="Stages to train: 'ppo*,rloo'; all if empty.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the points.")] = False,
) -> None:
    """A recipe at many settings: `n=1,3,5 seed=0,1` trains each combination, then the report.

    Without such settings, all stages of the recipe.
    """
    from marlhf import sweep as sweeping

    stages = [name.strip() for name in only.split(",") if name.strip()]
    if dry_run:
        plan = sweeping.make_plan(recipe, overrides or (), stages)
        typer.echo("\n".join(sweeping.describe_plan(plan)))
        return
    try:
        result = sweeping.sweep(recipe, overrides or (), jobs=jobs, deadline=deadline, only=stages)
    except KeyboardInterrupt:
        fail("Stopped. The same command resumes.", 130)
        return
    typer.echo("\n".join(sweeping.describe(result)))
    if result.report:
        typer.secho(f"report: {result.report}", bold=True, err=True)
    if result.failed:
        fail(f"{len(result.failed)} failed; the same command tries again.", 1)
    elif result.left:
        fail(f"{len(result.left)} are left; the same command resumes them.", LEFT)


@app.command("distil")
def run_distil(
    run: Annotated[Path, typer.Argument(help="The run or model to begin with.")],
    recipe: Recipe,
    overrides: Overrides = None,
    stage: StageName = None,
    blocks: Annotated[
        str, typer.Option(help="'ngram n=12', sentences, lines ..., as for best-of-n.")
    ] = "ngram n=12",
    k: Annotated[int, typer.Option(help="Candidates for each block.")] = 4,
    value: Annotated[str, typer.Option(help="reward, critic or monte_carlo.")] = "reward",
    continuations: Annotated[int, typer.Option(help="For --value monte_carlo.")] = 4,
    rounds: Annotated[int, typer.Option(help="Of sampling and SFT.")] = 3,
    prompts: Annotated[int, typer.Option(help="Training prompts of each round.")] = 1000,
    reward: Annotated[str | None, typer.Option(help="What scores. The run's own.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder; distil/ beside RUN.")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    seed: SampleSeed = 0,
    like: Like = None,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Rounds of best-of-k blocks and SFT on them; RECIPE has the settings of the SFT."""
    from marlhf.distil import distil
    from marlhf.evaluate.blocks import BlockOptions
    from marlhf.evaluate.blocks_frontier import frontier_table
    from marlhf.evaluate.eval_plan import EvaluationOptions

    options = EvaluationOptions(
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        rewards=(reward,) if reward else (),
        like=like,
        train=True,
        device=device,
        trust_code=trust_code,
    )
    rule = read_segmenter(blocks, "--blocks")
    chosen = BlockOptions(rule, blocks, (k,), cast(Any, value), continuations)
    output = output or run.parent / "distil"
    try:
        done = distil(
            run,
            recipe,
            output,
            options,
            chosen,
            rounds=rounds,
            overrides=overrides,
            stage=stage,
            notice=tell,
        )
    except KeyboardInterrupt:
        fail("Stopped. The same command resumes.", 130)
        return
    typer.echo(frontier_table([each.point for each in done]))
    tell(f"next: marlhf evaluate {output} --like {like or run}")


def _train(stage: Stage) -> None:
    try:
        METHODS[stage.kind].train(stage.config)
    except KeyboardInterrupt:
        fail("Stopped. The same command resumes from the last checkpoint, if there is one.", 130)
