"""Commands that show: recipes, settings, macro actions, this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from marlhf.cli.app import (
    Device,
    MaxNewTokens,
    Overrides,
    StageName,
    TrustCode,
    app,
    read_segmenter,
)
from marlhf.train.stages import METHODS


@app.command()
def recipes() -> None:
    """List the recipes that come with marlhf."""
    from marlhf.config.recipe_files import shipped_recipes

    for name, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:28}{first.removeprefix('# ') if first.startswith('#') else ''}")


@app.command()
def config(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(METHODS)}.")],
    recipe: Annotated[str | None, typer.Argument(help="Show this recipe, resolved.")] = None,
    overrides: Overrides = None,
    stage: StageName = None,
) -> None:
    """Every setting of a stage with its default and what it does; or a recipe, resolved."""
    import textwrap

    from marlhf.config.settings import describe, to_raw
    from marlhf.train.recipe import kind_class, load_stage

    if recipe:
        import yaml

        loaded = load_stage(recipe, kind, overrides, stage)
        typer.echo(yaml.safe_dump(to_raw(loaded.config), sort_keys=False, allow_unicode=True))
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
    from marlhf.core import parser_of
    from marlhf.spans.show import cut_text, draw_trees, paint
    from marlhf.train.recipe import ConfigError

    if (text is None) == (file is None):
        raise ConfigError("Give either --text or --file.")
    rule = read_segmenter(segmenter, "--segmenter")
    content = text if text is not None else _read(file)
    actions = cut_text(content, rule, tokenizer=tokenizer, model=model, seed=seed)
    if parser := parser_of(rule):
        typer.echo("\n".join([*draw_trees(content, parser), ""]))
    typer.echo(paint(actions, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    tokens = sum(len(action) for action in actions)
    mean = tokens / len(actions) if actions else 0
    typer.secho(
        f"{tokens} tokens in {len(actions)} macro actions, {mean:.1f} tokens each ({rule})",
        err=True,
    )


@app.command()
def chat(
    runs: Annotated[
        list[str], typer.Argument(help="Runs, folders of them, model folders, or hub names.")
    ],
    form: Annotated[
        str, typer.Option(help="How prompts are written: chat, hh, webgpt, tldr, apps, text.")
    ] = "auto",
    temperature: Annotated[float | None, typer.Option(help="The run's unless given.")] = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Annotated[int, typer.Option(help="Of the answers.")] = 0,
    device: Device = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Talk to one or several models side by side; questions may also be piped in."""
    import signal

    from marlhf.chat.models import load_chat_models
    from marlhf.chat.terminal import converse
    from marlhf.models.base import pick_device

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ctrl-C only interrupts an answer here
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


@app.command()
def doctor() -> None:
    """Versions, devices, and which extras are there."""
    from marlhf.cli.doctor import examine

    for line in examine():
        typer.echo(line)


@app.command()
def version() -> None:
    """Print the version."""
    from marlhf._version import __version__

    typer.echo(__version__)


def _read(file: Path | None) -> str:
    from marlhf.train.recipe import ConfigError

    assert file is not None
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}).") from None
