"""Names of settings in TRL and transformers' TrainingArguments, and what to write instead.

The table is in `trl_names.yaml`. docs/migrate.md has the same, with the defaults.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from marlhf.fields import read_table


def hint_for(name: str, known: Iterable[str] = ()) -> str:
    """What to write in place of an unknown setting; empty where nothing comes near.

    >>> hint_for("cliprange"), hint_for("optim"), hint_for("kl_cof", ["kl_coef", "clip"])
    ('In marlhf it is clip.', 'In marlhf it is optimizer.', 'Did you mean kl_coef?')
    """
    known, table = set(known), read_table("trl_names")
    if name == "max_completion_length" and "step_separator" in known:
        return "In marlhf it is max_response_tokens."
    if new := table["renamed"].get(name):
        ours = re.split(r"\W", new)[0]
        if "output_dir" in known and ours not in known:  # the settings of a stage without it
            return f"Leave it out: in marlhf it is {ours}, which this stage does not have."
        if ours == "batch_size" and "tree" in known:  # GRPO, RLOO
            return f"In marlhf it is {new}; TRL counts responses there, and marlhf prompts."
        return f"In marlhf it is {new}."
    if name in table["removed"]:
        return f"Leave it out: {table['removed'][name]}."
    absent = name in table["absent"] or name.startswith(tuple(table["prefixes"]))
    if near := difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8 if absent else 0.6):
        return f"Did you mean {near[0]}?"
    return "Leave it out: marlhf has nothing like it." if absent else ""
