"""Commands that write a recipe, and that train: stages, whole recipes, sweeps, verl's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marlhf.cli.app import Overrides, Recipe, StageName, app, fail, main_rank, tell, write_report_of
from marlhf.train.stages import STAGES

if TYPE_CHECKING:
    from marlhf.train.recipe import Stage

LEFT = 75
"""Exit status of a sweep that its deadline ended: try again later, as in sysexits.h."""
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Take any arguments, for another program to read."""


MODELS = {80: "Qwen/Qwen2.5-1.5B-Instruct", 14: "Qwen/Qwen2.5-0.5B-Instruct"}
SMALLEST = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What is proposed, by the least memory of a card in GB."""


@app.command("init")
def init(
    data: Annotated[
        str | None, typer.Option(help="A file, a folder of files, or a data set on the hub.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder, or a name on the hub.")] = None,
    card: Annotated[
        str | None, typer.Option(help="GPU or its memory: 4090, 24GB, auto, or none.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Recipe to write.")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Write a recipe that fits your data, model and GPU; ask for what is not given."""
    from marlhf.train.new_recipe import card_memory, look_at, write_recipe
    from marlhf.train.recipe import ConfigError

    try:
        if data is None:
            data = str(typer.prompt("Data (a file, a folder or a name on the hub)", err=True))
            look_at(data)  # a mistake is reported before the next question
        card = card or str(typer.prompt("GPU or its memory (none: CPU)", default="auto", err=True))
        memory = card_memory(card)
        proposed = next((name for least, name in MODELS.items() if memory >= least), SMALLEST)
        model = model or str(typer.prompt("Model", default=proposed, err=True))
    except typer.Abort:
        raise ConfigError(
            "There is no answer to read. Give --data, --card and --model instead."
        ) from None
    written = write_recipe(data, model, card, output)
    tell(f"{data}: {written.data.rows} rows, {written.data.kind}")
    for ours, theirs in written.data.columns.items():
        tell(f"  {theirs} is the {ours}")
    if written.rewards is not None:
        tell(f"{written.rewards}: an example of a reward function. Write your own there.")
    tell(f"recipe: {output}", bold=True)
    tell(f"next: marlhf run {output}")


def _add_command(kind: str, help_: str) -> None:
    def command(recipe: Recipe, overrides: Overrides = None, stage: StageName = None) -> None:
        from marlhf.train.recipe import check_stage

        checked = check_stage(recipe, kind, overrides, stage)  # before torch loads
        tell(f"{recipe}: {checked.name} in {checked.config.output_dir}")
        from marlhf.train.preflight import check_stages

        _train(check_stages([checked])[0])

    app.command(kind, help=help_)(command)


for name, method in STAGES.items():
    _add_command(name, method.help)


@app.command("run")
def run_all(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train all stages of a recipe in order, skip finished ones, and write the report."""
    from marlhf.runs.layout import facts_of
    from marlhf.train.recipe import check_recipe

    stages = check_recipe(recipe, overrides)  # a typo is reported before torch loads
    root = Path(stages[0].config.output_dir).parent
    tell(f"{recipe}: {', '.join(stage.name for stage in stages)} in {root}")
    _train_all(stages)
    if main_rank():
        write_report_of([root], root / "report.html")
        typer.echo(_results(stages))
        policies = [s.config.output_dir for s in stages if facts_of(s.kind).samples]
        pair = " ".join(policies[-2:])
        tell(f"next: marlhf chat {pair or root}")
        if len(policies) > 1:
            tell(f"      marlhf judge {pair} --judge openai:MODEL")


def _train_all(stages: list[Stage]) -> None:
    from marlhf.runtime.progress import stages_ahead
    from marlhf.train.preflight import check_stages

    stages = check_stages(stages)
    try:
        for number, stage in enumerate(stages, start=1):
            tell(f"[{number}/{len(stages)}] {stage.name}", bold=True)
            stages_ahead.begin(stage.kind, [(s.kind, s.config.num_steps) for s in stages[number:]])
            _train(stage)
    finally:
        stages_ahead.begin("", [])


def _results(stages: list[Stage]) -> str:
    """The last held-out numbers of each stage."""
    from marlhf.evaluate.results import text_table
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
    jobs: Annotated[int, typer.Option(help="Runs to train at the same time.")] = 1,
    deadline: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Save and stop after this long.")
    ] = None,
    only: Annotated[
        str, typer.Option(help="Stages to train, as in 'ppo*,rloo' (default: all).")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the points without training.")
    ] = False,
) -> None:
    """Train a recipe at every combination of settings such as `n=1,3,5 seed=0,1`, then report.

    Without such settings, train all stages of the recipe.
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
        fail(f"{len(result.failed)} failed. Run the same command to try again.", 1)
    elif result.left:
        fail(f"{len(result.left)} are left. Run the same command to resume them.", LEFT)


@app.command("verl", context_settings=PASS_ON)
def run_verl(context: typer.Context) -> None:
    """Start verl's PPO trainer with macro actions: `marlhf verl algorithm.adv_estimator=macro_gae`.

    All arguments are overrides of verl's configuration; `algorithm.macro.*` are ours.
    """
    from marlhf.engines.verl_config import start_verl

    start_verl(context.args)


def _train(stage: Stage) -> None:
    try:
        STAGES[stage.kind].train(stage.config)
    except KeyboardInterrupt:
        fail("Stopped. The same command resumes from the last checkpoint, if there is one.", 130)
