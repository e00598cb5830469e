"""Process reward models: training, labels from continuations, and learning from their rewards."""

import json
import re
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

from marlhf import DataConfig, GRPOConfig, LoRA, PRMConfig, PRMTrainer, RewardConfig, RLOOConfig
from marlhf.data import DataError, rows_from_records
from marlhf.errors import SettingError, UnknownNameError
from marlhf.models.base import ModelError
from marlhf.models.facts import model_facts
from marlhf.models.load import load_policy, load_scalar, load_tokenizer
from marlhf.models.tiny import tiny_tokenizer
from marlhf.reward.process import ProcessModel, StepEnds, cut_steps
from marlhf.rollout import Sampling
from marlhf.rollout.native import NativeEngine
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.stage import Example, GivenObjects, Stopped
from marlhf.train import ppo, prm, reward, rloo
from marlhf.train.rl_models import Rewards
from marlhf.train.supervised import Passes
from marlhf.train.supervised_config import LabelsFrom
from small_runs import TOY, assert_close, read_lines, stop_after, weights

SHORT = {"batch_size": 8, "num_steps": 4, "learning_rate": 1e-3, "eval_every": 2, "save_every": 1}


def step_rows(count=48):
    """Sums, some of them wrong, in TRL's stepwise format."""
    rows = []
    for n in range(count):
        sums = [(n % 5, k, n % 5 + k + (n % (k + 3) == 0)) for k in range(1 + n % 3)]
        steps = [f"{a}+{b}={c}" for a, b, c in sums]
        labels = [a + b == c for a, b, c in sums]
        rows.append({"prompt": f"Add {n}:\n", "completions": steps, "labels": labels})
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("steps") / "steps.jsonl"
    file.write_text("\n".join(map(json.dumps, step_rows())))
    return DataConfig(path=str(file), parts={}, eval_size=8)


@pytest.fixture(scope="module")
def process_model(tmp_path_factory, parents):
    """A folder with a barely trained process model; `process_model(separator)`."""

    def make(separator: str) -> str:
        folder = tmp_path_factory.mktemp("process") / "prm"
        start = str(parents / "sft" / "model")
        args = PRMConfig(output_dir=str(folder), step_separator=separator, **SHORT)
        PRMTrainer(start, args, step_rows()).train()
        return str(folder / "model")

    return make


def test_a_trl_data_set_trains_a_model_that_says_how_it_cuts_steps(tmp_path):
    rows = Dataset.from_list(step_rows())
    args = PRMConfig(output_dir=str(tmp_path / "prm"), **SHORT)
    trainer = PRMTrainer("tiny", args, train_dataset=rows, eval_dataset=rows.select(range(8)))
    trainer.train()
    found = trainer.evaluate()
    assert set(found) == {
        *("eval_loss", "eval_accuracy", "eval_balanced_accuracy"),
        *("eval_first_error", "eval_error_free"),
    }
    folder = str(tmp_path / "prm" / "model")
    assert model_facts(folder).step_separator == "\n"
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    assert plain.config.num_labels == 1
    assert model_facts(trainer.model).step_separator == "\n"
    card = (tmp_path / "prm" / "model" / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    space = {}
    exec(code.replace('"prm"', repr(folder)), space)
    assert 0 < space["good"][-1] < 1


@pytest.mark.parametrize("budget", [20, 100_000])
def test_the_loss_is_the_mean_over_steps(budget):
    """Gradients and loss are those of one step after another, however passes are cut."""
    tokenizer, model = tiny_tokenizer(), load_scalar("tiny")
    rows, _ = rows_from_records(step_rows(5), needs=PRMConfig().columns)
    examples = [
        Example(row, tokenizer.encode(row.prompt), [*tokenizer.encode(row.chosen), 1], [])
        for row in prm.responses_of(rows, "\n")
    ]
    ends = StepEnds(tokenizer, "\n")
    losses, right = [], []
    for example in examples:
        ids = torch.tensor([example.prompt + example.chosen])
        scores = model.score(model.base_model(ids).last_hidden_state)[0, :, 0]
        for end, label in zip(ends([example.chosen])[0], example.row.columns["labels"]):
            p = scores[len(example.prompt) + end].sigmoid()
            losses.append(-(p if label else 1 - p).log())
            right.append(float((p >= 0.5) == label))
    loss = torch.stack(losses).mean()
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    passes = Passes(model, tokenizer.pad_token_id, budget, "auto", World(torch.device("cpu")))
    mine, accuracy = prm.backward(passes, ends, examples)
    torch.testing.assert_close(mine, loss.detach())
    assert float(accuracy) == pytest.approx(sum(right) / len(right))
    for p, gradient in zip(model.parameters(), wanted):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
    whole = prm.evaluate(passes, ends, examples)
    assert whole["eval/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert whole["eval/accuracy"] == pytest.approx(float(accuracy))


def test_judging_is_a_loop_over_responses():
    generator = torch.Generator().manual_seed(1)
    labels = torch.rand(40, 6, generator=generator)
    logits = torch.randn(40, 6, generator=generator)
    for row in range(40):
        labels[row, 1 + row % 6 :] = -1
    labels[::3] = torch.where(labels[::3] >= 0, 1.0, -1.0)  # responses without an error
    logits[::9] = 2.0
    steps, found, clean = [], [], []
    for own, given in zip(logits.tolist(), labels.tolist()):
        real = [(x >= 0, y >= 0.5) for x, y in zip(own, given) if y >= 0]
        steps += real
        firsts = [[step[k] for step in real].index(False) if not all(s[k] for s in real) else None
                  for k in (0, 1)]  # fmt: skip
        (clean if firsts[1] is None else found).append(firsts[0] == firsts[1])
    recall = [[a == b for a, b in steps if b is good] for good in (True, False)]
    _, accuracy, balanced, first_error, error_free = prm.judge(logits, labels)
    assert accuracy == pytest.approx(sum(a == b for a, b in steps) / len(steps))
    assert balanced == pytest.approx(sum(sum(r) / len(r) for r in recall) / 2)
    assert first_error == pytest.approx(sum(found) / len(found))
    assert error_free == pytest.approx(sum(clean) / len(clean))


def test_a_stopped_run_resumes_identically(data, tmp_path, monkeypatch):
    whole = PRMConfig(model="tiny", output_dir=str(tmp_path / "a"), data=data, **SHORT)
    prm.train(whole)
    broken = replace(whole, output_dir=str(tmp_path / "b"))
    with monkeypatch.context() as patch:
        stop_after(2, patch, prm)
        with pytest.raises(Stopped):
            prm.train(broken)
    prm.train(broken)
    assert read_lines(tmp_path / "b") == read_lines(tmp_path / "a")
    assert weights(broken.output_dir) == weights(whole.output_dir)


GOOD = {"prompt": "p", "completions": ["a", "b"], "labels": [True, 0.5]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"labels": [True]}, "`completions` has 2 steps, but there are 1 labels"),
        ({"labels": 1.0}, "`completions` has 2 steps, but there are no list of labels"),
        ({"labels": [True, "yes"]}, "the label 'yes' is neither true nor false"),
        ({"labels": [True, float("nan")]}, "the label nan is neither true nor false"),
        ({"labels": [True, -1]}, "the label -1 is neither true nor false"),
        ({"completions": ["a", " "]}, "`completions` has an empty step"),
        ({"completions": [], "labels": []}, "`completions` is empty"),
        ({"completions": "a b"}, "`completions` is not a list of steps as text"),
    ],
)
def test_bad_rows_are_named(change, reason):
    needs = PRMConfig().columns
    rows, counts = rows_from_records([GOOD, {**GOOD, **change}], needs=needs)
    assert len(rows) == 1
    assert any(line.startswith(reason) for line in counts.dropped), counts.dropped
    with pytest.raises(DataError, match=r"kept 0"):
        rows_from_records([{**GOOD, **change}], needs=needs)


def test_missing_columns_and_settings_that_fit_no_row(tmp_path):
    with pytest.raises(DataError, match="has no column `labels`"):
        rows_from_records([{"prompt": "p", "completions": ["a"]}], needs=PRMConfig().columns)
    rows, _ = rows_from_records([{**GOOD, "completions": ["a\nb", "c"]}])
    with pytest.raises(RunError, match="Every row has a step with the separator"):
        prm.responses_of(rows, "\n")
    assert prm.responses_of(rows, "\n\n")[0].chosen == "a\nb\n\nc"
    with pytest.raises(SettingError, match="step_separator must not be empty"):
        PRMConfig(step_separator="")
    with pytest.raises(SettingError, match=r"lora\.merge"):
        PRMConfig(lora=LoRA(merge=False))
    with pytest.raises(SettingError, match="labels_from needs `policy`"):
        LabelsFrom()
    assert PRMConfig(labels_from=LabelsFrom("a", ("b:c",))).columns == ("prompt",)
    with pytest.raises(UnknownNameError, match="max_response_tokens"):
        PRMConfig(max_completion_length=3)


VERIFIERS = """
def even(completions):
    return [float(len(text) % 2 == 0) for text in completions]


def long_lines(completions):
    return [[float(len(line) > 3) for line in text.splitlines()] for text in completions]
"""


@pytest.fixture
def verifiers(tmp_path, monkeypatch):
    """Functions of the user's own: responses with an even number of letters, and long lines."""
    (tmp_path / "step_verifiers.py").write_text(VERIFIERS)
    monkeypatch.chdir(tmp_path)


def labels_config(parents, folder, **changes):
    own = {"responses": 12, "continuations": 3, "sampling": Sampling(max_new_tokens=14), **changes}
    own = {"code": ("step_verifiers",), **own}
    settings = LabelsFrom(str(parents / "sft" / "model"), ("step_verifiers:even",), **own)
    start = str(parents / "sft" / "model")
    data = replace(TOY, limit=60)
    return PRMConfig(
        model=start, output_dir=str(folder), data=data, labels_from=settings,
        **{**SHORT, "batch_size": 4, "num_steps": 2, "step_separator": " "},
    )  # fmt: skip


def lines_of(folder):
    return (folder / prm.LABELLED).read_text().splitlines()


@pytest.mark.parametrize("hard", [False, True])
def test_labels_are_shares_of_continuations(parents, tmp_path, verifiers, hard):
    """One response, one continuation and one verdict at a time give the same labels."""
    config = labels_config(parents, tmp_path / "prm", hard=hard)
    prm.train(config)
    lines = [json.loads(line) for line in lines_of(tmp_path / "prm")]
    settings, tokenizer = config.labels_from, load_tokenizer(config.model)
    engine = NativeEngine(load_policy(config.model), [tokenizer.eos_token_id], 0)
    generator = torch.Generator().manual_seed(config.seed)
    seeds = torch.randint(2**62, (len(lines),), generator=generator).tolist()
    several = 0

    def is_even(ids):
        return float(len(tokenizer.decode(ids, skip_special_tokens=True)) % 2 == 0)

    for line, seed in zip(lines, seeds):
        prompt = tokenizer.encode(line["prompt"])
        [response] = engine.generate([prompt], settings.sampling, [seed]).responses
        steps = cut_steps(tokenizer.decode(response, skip_special_tokens=True), " ")
        assert line["completions"] == steps
        [ends], number, labels = StepEnds(tokenizer, " ")([response]), 0, []
        for end in ends[:-1]:
            right = []
            for _ in range(settings.continuations):
                number += 1
                before = response[: end + 1]
                left = settings.sampling.max_new_tokens - len(before)
                [new] = engine.generate(
                    [prompt + before], settings.sampling, [seed + number], [left]
                ).responses
                right.append(is_even(before + new))
            labels.append(float(any(right)) if hard else sum(right) / len(right))
        labels.append(is_even(response))
        assert line["labels"] == pytest.approx(labels)
        several += len(labels) > 1
    assert several > 4


def test_labels_of_a_killed_run_are_not_sampled_again(parents, tmp_path, verifiers, monkeypatch):
    config = labels_config(parents, tmp_path / "a")
    prm.train(config)
    broken = replace(config, output_dir=str(tmp_path / "b"))
    monkeypatch.setattr(prm, "CHUNK", 20)
    real, calls = prm.Labeller.__call__, []

    def killed(self, numbers):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(numbers)
        return real(self, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(prm.Labeller, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            prm.train(broken)
    assert len(lines_of(tmp_path / "b")) == 5
    prm.train(broken)
    assert lines_of(tmp_path / "b") == lines_of(tmp_path / "a")
    assert weights(broken.output_dir) == weights(config.output_dir)


def test_labels_from_a_verifier_of_steps(parents, tmp_path, verifiers):
    config = labels_config(parents, tmp_path / "prm", continuations=0)
    verified = replace(config.labels_from, reward_funcs=("step_verifiers:long_lines",))
    config = replace(config, labels_from=verified, step_separator="\n", output_dir=str(tmp_path))
    with pytest.raises(RunError, match="one number per line, and these return one per response"):
        prm.train(labels_config(parents, tmp_path / "other", continuations=0))
    prm.train(replace(config, output_dir=str(tmp_path / "steps")))
    for line in map(json.loads, lines_of(tmp_path / "steps")):
        assert line["labels"] == [float(len(step) > 3) for step in line["completions"]]


def test_one_step_per_response_learns_as_from_an_outcome(ppo_config, process_model, monkeypatch):
    """A separator that nobody writes: the same run, bit for bit, as with a function's numbers."""
    path, earned, real = process_model("\u2603\u2603"), [], ProcessModel.__call__

    def recorded(self, *given):
        rewards = real(self, *given)
        earned.append(rewards.sum(dim=1).tolist())
        return rewards

    monkeypatch.setattr(ProcessModel, "__call__", recorded)
    short = {"reward_model": "", "num_steps": 2, "save_every": 0}
    runs = [ppo_config("sum", process_model=path, process_pooling="sum", **short)]
    ppo.train(runs[0])
    numbers = iter(list(earned))
    runs.append(ppo_config("outcome", **short))
    ppo.train(runs[1], GivenObjects(reward_funcs=[lambda completions: next(numbers)]))
    sums, outcome = (read_lines(run.output_dir) for run in runs)
    assert sums == outcome
    assert weights(runs[0].output_dir) == weights(runs[1].output_dir)


def test_every_method_learns_from_a_process_model(ppo_config, process_model, parents):
    path = process_model(" ")
    both = ppo_config("both", process_model=path, process_weight=0.5, num_steps=1)
    ppo.train(both)
    [line] = [x for x in read_lines(both.output_dir) if x["kind"] == "train"]
    assert line["rl/score"] == pytest.approx(
        line["rewards/reward"] + 0.5 * line["rewards/process"], rel=1e-4
    )
    [first, *_] = read_lines(both.output_dir, "eval.jsonl")
    assert sum(first["earned"]) == pytest.approx(sum(first["scores"]) / len(first["scores"]), 1e-3)
    assert sum(x != 0 for x in first["earned"]) > 3
    shared = {"reward_model": "", "process_model": path, "process_pooling": "sum", "num_steps": 1}
    base = ppo_config("base", **shared)
    names = ("model", "data", "batch_size", "num_steps", "sampling", "eval_prompts")
    some = {name: getattr(base, name) for name in names}
    for kind, stage in ((RLOOConfig, "rloo"), (GRPOConfig, "grpo")):
        folder = base.output_dir + stage
        config = kind(output_dir=folder, num_samples=2, process_model=path, **some)
        rloo.train(config, stage=stage)
        assert any("rl/score" in line for line in read_lines(folder))


def test_without_a_process_model_scores_are_of_whole_responses():
    scores = Rewards([("a", lambda *_: torch.tensor([1.0, 2.0]), 1.0)])([[1], [1]], [[2], [3]], [])
    assert scores.tolist() == [1.0, 2.0]


def test_the_wrong_head_is_a_sentence(ppo_config, process_model, parents, tmp_path):
    process, outcome = process_model("\n"), str(parents / "reward" / "model")
    start = str(parents / "sft" / "model")
    with pytest.raises(RunError, match=r"`process_model`: .* is an outcome reward model"):
        ppo.train(ppo_config("a", process_model=outcome))
    with pytest.raises(RunError, match=r"`process_model`: .* is a language model"):
        ppo.train(ppo_config("b", process_model=start))
    for n, setting in enumerate(({"reward_model": process}, {"gold_model": process})):
        with pytest.raises(ModelError, match=f"`{next(iter(setting))}`: .* process reward model"):
            ppo.train(ppo_config(f"c{n}", **setting))
    given = GivenObjects(reward_funcs=[load_scalar(process)])
    with pytest.raises(ModelError, match="process reward model"):
        ppo.train(ppo_config("d", reward_model=""), given)
    with pytest.raises(SettingError, match="Leave out process_model, or environment"):
        ppo_config("e", process_model=process, environment="guess")
    again = RewardConfig(model=process, output_dir=str(tmp_path / "reward"), data=TOY, **SHORT)
    assert model_facts(str(reward.train(again))).step_separator is None  # the head was trained anew


def test_accumulation_is_a_large_batch(data, tmp_path):
    lines = []
    for budget in (100_000, 40):
        folder = tmp_path / str(budget)
        more = {**SHORT, "num_steps": 2, "save_every": 0}
        prm.train(
            PRMConfig(model="tiny", output_dir=str(folder), data=data, token_budget=budget, **more)
        )
        lines.append(read_lines(folder))
    assert_close(*lines, 1e-3)


@pytest.mark.distributed
@pytest.mark.xdist_group("forked")
def test_two_processes_label_and_train_as_one(parents, tmp_path, verifiers, start):
    one, two = (labels_config(parents, tmp_path / name) for name in ("one", "two"))
    prm.train(one)
    process = start(two, "prm", ranks=True)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert lines_of(tmp_path / "two") == lines_of(tmp_path / "one")
    logged = [
        [{k: v for k, v in line.items() if v is not None} for line in read_lines(tmp_path / name)]
        for name in ("one", "two")
    ]  # no number where no step is wrong
    assert_close(*logged, 1e-3)
