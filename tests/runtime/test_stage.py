import signal

import pytest

from marlhf.data import DataConfig, Row
from marlhf.models.tiny import tiny_tokenizer
from marlhf.runtime.stage import GivenObjects, Interrupts, Stopped, load_examples


def test_the_first_ctrl_c_is_answered_at_once_and_the_second_ends(capfd):
    with Interrupts() as interrupts:
        interrupts.check("before any signal")
        signal.raise_signal(signal.SIGINT)
        assert "SIGINT: stopping after this step, which is saved." in capfd.readouterr().err
        with pytest.raises(Stopped, match=r"Stopped by SIGINT, here\. The same command resumes"):
            interrupts.check("here")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_closed_terminal_saves_like_sigterm(repeats):
    """A shell and the kernel may both send SIGHUP: the second must not cut the saving short."""
    with Interrupts() as interrupts:
        for _ in range(repeats):
            signal.raise_signal(signal.SIGHUP)
        with pytest.raises(Stopped, match="Stopped by SIGHUP"):
            interrupts.check("saved at step 1")


def test_under_nohup_a_closed_terminal_means_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            interrupts.check("here")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_counts_say_which_rows_they_are_of(capfd):
    rows = [Row("Why?", " So."), Row("Why? " * 40, " So.")]
    objects = GivenObjects(train_rows=rows, eval_rows=rows)
    data = DataConfig(max_prompt_tokens=20)
    load_examples(data, "sft", tiny_tokenizer(), objects, name="x", needs=("prompt", "chosen"))
    said = capfd.readouterr()
    for part in ("train", "eval"):
        assert f"{part}: read 2 rows, kept 1" in said.out + said.err
