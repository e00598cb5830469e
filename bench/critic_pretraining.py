"""What each epoch of `critic_pretraining` taught a critic, on held-out prompts, and after how long.

marlhf run evidence/critic
python bench/critic_pretraining.py runs/evidence/critic/ppo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from marlhf.evaluate.results import text_table
from marlhf.runs.layout import read_state
from marlhf.train.critic_training import FOLDER

COLUMNS = {
    "epoch": "epoch",
    "seconds": "seconds",
    "explained variance": "explained_variance",
    "first third": "explained_variance_1",
    "second": "explained_variance_2",
    "last": "explained_variance_3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    pretraining = read_state(parser.parse_args().run)[FOLDER]
    rows = [
        [f"{epoch[key]:.{0 if place < 2 else 2}f}" for place, key in enumerate(COLUMNS.values())]
        for epoch in pretraining["epochs"]
    ]
    print(f"{pretraining['responses']} responses")
    print(text_table(list(COLUMNS), rows))


if __name__ == "__main__":
    main()
