"""The command that begins: init writes a recipe for data of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marlhf.cli.app import app, tell

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
