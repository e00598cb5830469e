"""The command line: a thin layer over the functions that do the work.

Nothing heavy is imported until a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

app = typer.Typer(
    name="marlhf",
    help="Reinforcement learning from human feedback with macro actions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Recipe = Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")
]
StageName = Annotated[
    str | None, typer.Option("--stage", help="Which stage, where the recipe has several.")
]


class Several(typer.core.TyperCommand):
    """A command whose repeatable options also take several values at once: `--n 4 8 16`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {flag for p in self.params if getattr(p, "multiple", False) for flag in p.opts}
        spread: list[str] = []
        flag, has_value = "", False
        for word in args:
            if word.startswith("-") and not word[1:2].isdigit():
                flag, has_value = word if word in several else "", False
            elif flag and has_value:
                spread.append(flag)
            elif flag:
                has_value = True
            spread.append(word)
        return super().parse_args(ctx, spread)


def main() -> None:
    """Run a command; a user's mistake is a sentence and exit status 1, never a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        app()
    except KeyboardInterrupt:
        _fail("Stopped.", 130)
    except Exception as error:
        if os.environ.get("MARLHF_TRACEBACK") or not _expected(error):
            raise
        _fail(str(error), 130 if type(error).__name__ == "Stopped" else 1)


@app.command("sft")
def run_sft(recipe: Recipe, overrides: Overrides = None, stage: StageName = None) -> None:
    """Supervised fine-tuning on chosen responses."""
    _run_stage("sft", recipe, overrides, stage)


@app.command("reward")
def run_reward(recipe: Recipe, overrides: Overrides = None, stage: StageName = None) -> None:
    """Train a reward model on pairs of responses."""
    _run_stage("reward", recipe, overrides, stage)


@app.command("ppo")
def run_ppo(recipe: Recipe, overrides: Overrides = None, stage: StageName = None) -> None:
    """PPO over macro actions."""
    _run_stage("ppo", recipe, overrides, stage)


@app.command("rloo")
def run_rloo(recipe: Recipe, overrides: Overrides = None, stage: StageName = None) -> None:
    """RLOO and GRPO: several responses a prompt instead of a critic."""
    _run_stage("rloo", recipe, overrides, stage)


@app.command("dpo")
def run_dpo(recipe: Recipe, overrides: Overrides = None, stage: StageName = None) -> None:
    """Direct preference optimisation, without a reward model."""
    _run_stage("dpo", recipe, overrides, stage)


@app.command("run")
def run_all(recipe: Recipe, overrides: Overrides = None) -> None:
    """All stages of a recipe in order, skipping finished ones, then the report."""
    from marlhf.config import load_recipe

    stages = load_recipe(recipe, overrides)
    for number, stage in enumerate(stages, start=1):
        typer.secho(f"[{number}/{len(stages)}] {stage.name}", bold=True, err=True)
        _train(stage.kind, stage.config)
    root = Path(stages[0].config.output_dir).parent
    if os.environ.get("RANK", "0") == "0":  # of several processes, one writes
        _report([root], root / "report.html")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write.")] = Path(
        "report.html"
    ),
) -> None:
    """One HTML file that compares runs."""
    _report(runs, output)


@app.command("pass-at-k")
def pass_at_k(
    run: Annotated[Path, typer.Argument(help="A run folder with a finished model.")],
    more: Annotated[list[int] | None, typer.Argument(metavar="[K]...", hidden=True)] = None,
    k: Annotated[list[int] | None, typer.Option(help="One or more, as in --k 1 5.")] = None,
    samples: Annotated[int | None, typer.Option(help="A problem; 10 unless given.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only so many problems.")] = None,
    temperature: Annotated[float | None, typer.Option(help="The run's unless given.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="The run's unless given.")] = None,
    source: Annotated[str | None, typer.Option(help="Other data: apps, mbpp, ...")] = None,
    path: Annotated[str | None, typer.Option(help="Other data: a file or folder.")] = None,
    split: Annotated[str | None, typer.Option(help="All of a split, such as test.")] = None,
    seconds: Annotated[float, typer.Option(help="For a program on one test.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
) -> None:
    """Share of programming problems that k samples solve, by unit tests."""
    from marlhf.evaluate.pass_at_k import Question, measure
    from marlhf.reward.code import UnitTests

    ks = tuple(sorted({*(k or ()), *(more or ())})) or (1, 5)
    question = Question(
        k=ks,
        samples=max(10, *ks) if samples is None else samples,
        prompts=prompts,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        source=source,
        path=path,
        split=split,
        seed=seed,
        device=device,
    )

    def progress(done: int, total: int) -> None:
        typer.secho(f"{done} of {total} problems", err=True)

    found = measure(run, question, UnitTests(seconds=seconds), progress)
    for row in found["rows"]:
        numbers = [(k, *(100 * x for x in row[f"pass@{k}"])) for k in ks]
        shown = "  ".join(
            f"pass@{k} {m:5.2f} [{low:.2f}, {high:.2f}]" for k, m, low, high in numbers
        )
        typer.echo(f"{row['difficulty']:14} {row['problems']:5} problems  {shown}")
    if found["without_verdict"]:
        typer.secho(f"{found['without_verdict']} problems have no verdict: see the log", err=True)


@app.command("evaluate", cls=Several)
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Runs, folders of them, or model folders.")],
    prompts: Annotated[int, typer.Option(help="Held-out prompts to ask.")] = 2000,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="One or more: a model's folder, a run, module:function. The run's own."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="The run's unless given.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="The run's unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    reference: Annotated[
        str | None, typer.Option(help="What KL is measured to, or none. The run's own.")
    ] = None,
    like: Annotated[str | None, typer.Option(help="A run to take from what RUN lacks.")] = None,
    source: Annotated[str | None, typer.Option(help="Other data: tldr, hh, ...")] = None,
    path: Annotated[str | None, typer.Option(help="Other data: a file or folder.")] = None,
    split: Annotated[str | None, typer.Option(help="All of a split, such as test.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
) -> None:
    """Score responses to held-out prompts, of any model by any reward models."""
    from marlhf.evaluate.held_out import summary_table
    from marlhf.evaluate.score import evaluate
    from marlhf.evaluate.subjects import Question

    question = Question(
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
    )
    found = evaluate(runs, question, _tell)
    typer.echo(summary_table([(each.name, each.summary) for each in found]))
    for each in found:
        _tell(str(each.file))


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
    train: Annotated[bool, typer.Option("--train", help="Ask training prompts instead.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="The run's unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    like: Annotated[str | None, typer.Option(help="A run to take from what RUN lacks.")] = None,
    source: Annotated[str | None, typer.Option(help="Other data: tldr, hh, ...")] = None,
    path: Annotated[str | None, typer.Option(help="Other data: a file or folder.")] = None,
    split: Annotated[str | None, typer.Option(help="All of a split, such as test.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
) -> None:
    """What the best of n samples scores, at each n and temperature."""
    from marlhf.evaluate import best_of_n as sampler
    from marlhf.evaluate.grids import grid_table
    from marlhf.evaluate.subjects import Question

    question = Question(
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
    )
    found = sampler.best_of_n(run, question, n or (4, 8, 16, 32), temperature or (), _tell)
    typer.echo(grid_table(found))
    if export is None:
        return
    heat, kept, left = sampler.export(found, export)
    _tell(f"{export}: {kept} rows at temperature {heat:g}; {left} cut off or empty left out")
    if not (train or source or path or split):
        _tell("These are held-out prompts: what learns from them cannot be evaluated on them.")


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions at a time.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a reply.")] = 120.0,
    price_in: Annotated[float | None, typer.Option(help="Of a million tokens asked.")] = None,
    price_out: Annotated[float | None, typer.Option(help="Of a million tokens replied.")] = None,
    seed: Annotated[int, typer.Option(help="Of random orders.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Verdicts.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where replies are kept.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda ...")] = "auto",
) -> None:
    """Which of two models answers better, prompt by prompt; the key is in OPENAI_API_KEY."""
    from marlhf.evaluate import judge as judging

    def progress(done: int, total: int) -> None:
        if done == total or done % max(1, total // 20) == 0:
            typer.secho(f"{done} of {total} questions", err=True)

    found = judging.judge(
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
        say=lambda line: typer.secho(line, err=True),
        progress=progress,
    )
    if found:
        typer.echo("\n".join(judging.describe(found)))
        typer.secho(f"verdicts: {found['path']}", bold=True, err=True)


@app.command("agreement")
def agreement(
    files: Annotated[list[Path], typer.Argument(help="Verdict files, or runs that were judged.")],
    seed: Annotated[int, typer.Option(help="Of the intervals.")] = 0,
) -> None:
    """How far judges agree on the same pairs, beyond chance."""
    from marlhf.evaluate import agreement as agreeing

    typer.echo("\n".join(agreeing.describe(agreeing.agreement(files, seed=seed))))


@app.command()
def recipes() -> None:
    """List the recipes that come with marlhf."""
    from marlhf.config import shipped_recipes

    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:28}{first.removeprefix('# ') if first.startswith('#') else ''}")


@app.command()
def config(
    kind: Annotated[str, typer.Argument(help="sft, reward, ppo, rloo or dpo.")],
    recipe: Annotated[str | None, typer.Argument(help="Show this recipe, resolved.")] = None,
    overrides: Overrides = None,
    stage: StageName = None,
) -> None:
    """Every setting of a stage with its default and what it does; or a recipe, resolved."""
    import textwrap

    from marlhf.config import kind_class, load_stage
    from marlhf.settings import describe, to_raw

    if recipe:
        import yaml

        found = load_stage(recipe, kind, overrides, stage)
        typer.echo(yaml.safe_dump(to_raw(found.config), sort_keys=False, allow_unicode=True))
        return
    for name, type_, default, text in describe(kind_class(kind)):
        head = typer.style(name, bold=True)
        typer.echo(f"{head}: {type_} = {default}" if type_ else head)
        typer.echo(textwrap.fill(text, 92, initial_indent="    ", subsequent_indent="    "))


@app.command()
def segment(
    text: Annotated[str | None, typer.Option(help="The text to cut.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with the text.")] = None,
    segmenter: Annotated[
        str, typer.Option("--segmenter", "-s", help="ngram, 'ngram n=3', 'words max_length=4' ...")
    ] = "ngram",
    tokenizer: Annotated[
        str, typer.Option(help="Whose tokens: a folder, a hub name, a GGUF file, or tiny.")
    ] = "tiny",
    model: Annotated[
        str | None, typer.Option(help="Reference model, which perplexity rules need.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random rules.")] = 0,
) -> None:
    """Show a text with its macro actions marked; of constituents the trees, too."""
    from marlhf.config import ConfigError, build_segmenter
    from marlhf.core import Constituents
    from marlhf.spans.show import cut_text, draw_trees, paint

    if (text is None) == (file is None):
        raise ConfigError("Give either --text or --file.")
    name, *settings = segmenter.split()
    raw: dict[str, object] = {"type": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"Cannot read {setting!r}. Write --segmenter 'ngram n=3'.")
        import yaml

        raw[key] = yaml.safe_load(value)
    rule = build_segmenter(raw)
    content = text if text is not None else _read(file)
    actions = cut_text(content, rule, tokenizer=tokenizer, model=model, seed=seed)
    if isinstance(rule, Constituents):
        typer.echo("\n".join([*draw_trees(content, rule.parser), ""]))
    typer.echo(paint(actions, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    tokens = sum(len(action) for action in actions)
    mean = tokens / len(actions) if actions else 0
    typer.secho(
        f"{tokens} tokens in {len(actions)} macro actions, {mean:.1f} tokens each ({rule})",
        err=True,
    )


@app.command()
def doctor() -> None:
    """Versions, devices, and which extras are there."""
    from marlhf.doctor import examine

    for line in examine():
        typer.echo(line)


@app.command()
def version() -> None:
    """Print the version."""
    from marlhf import __version__

    typer.echo(__version__)


def _tell(words: str) -> None:
    typer.secho(words, err=True)


def _run_stage(kind: str, recipe: str, overrides: list[str] | None, name: str | None) -> None:
    from marlhf.config import load_stage

    _train(kind, load_stage(recipe, kind, overrides, name).config)


def _train(kind: str, config: object) -> None:
    import importlib

    try:
        importlib.import_module(f"marlhf.train.{kind}").train(config)
    except KeyboardInterrupt:
        _fail("Stopped. The same command goes on from the last checkpoint, if there is one.", 130)


def _report(runs: list[Path], output: Path) -> None:
    from marlhf.config import ConfigError
    from marlhf.evaluate.report import write_report

    try:
        written = write_report(runs, output)
    except OSError as error:
        raise ConfigError(f"Cannot write {output}: {error.strerror}. Give another -o.") from error
    typer.secho(f"report: {written}", bold=True, err=True)


def _read(file: Path | None) -> str:
    from marlhf.config import ConfigError

    assert file is not None
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}).") from None


def _expected(error: Exception) -> bool:
    """Errors that are about the user's input, which explain themselves."""
    if type(error).__name__ in ("RunError", "RewardError", "Stopped"):
        return True
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    ours = trace is not None and trace.tb_frame.f_globals["__name__"].startswith("marlhf")
    return isinstance(error, ValueError) and ours


def _fail(message: str, status: int) -> None:
    typer.secho(message, fg="red", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
