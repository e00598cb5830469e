"""Commands that start other people's trainers with macro actions in them."""

from __future__ import annotations

import typer

from marlhf.cli.app import app


@app.command("verl", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run_verl(context: typer.Context) -> None:
    """verl's PPO trainer with macro actions: `marlhf verl algorithm.adv_estimator=macro_gae ...`

    All words are overrides of verl's configuration; `algorithm.macro.*` are ours.
    """
    from marlhf.engines.verl_config import start_verl

    start_verl(context.args)
