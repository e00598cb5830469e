import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    MistralConfig,
    Qwen2Config,
)

from marlhf.data import Counts, DataConfig, Loaded, Row
from marlhf.models.load import load_policy, load_tokenizer
from marlhf.models.tiny import tiny_tokenizer
from marlhf.rollout import Sampling
from marlhf.runs.layout import RunError
from marlhf.runtime.distributed import World
from marlhf.runtime.stage import Example, batch_rows, each_prompt_once, load_examples
from marlhf.train import ppo, reward, sft
from marlhf.train.supervised import Passes
from small_runs import TOY, assert_close, read_lines

SHORT = {"data": TOY, "batch_size": 16, "num_steps": 3, "eval_every": 2, "save_every": 0}


def test_sft_loss_is_transformers_own(tmp_path):
    """One batch, labels of -100 on prompt and padding, by transformers' forward."""
    config = sft.SFTConfig(model="tiny", output_dir=str(tmp_path / "a"), **SHORT)
    tokenizer, model = load_tokenizer("tiny"), load_policy("tiny")
    examples, _ = load_examples(config.data, "sft", tokenizer, needs=("prompt", "chosen"))
    rows = examples[:8]
    width = max(len(e.prompt) + len(e.chosen) for e in rows)
    ids = torch.full((8, width), tokenizer.pad_token_id)
    labels, attention = torch.full((8, width), -100), torch.zeros(8, width, dtype=torch.long)
    for i, e in enumerate(rows):
        whole = torch.tensor(e.prompt + e.chosen)
        ids[i, : len(whole)] = whole
        attention[i, : len(whole)] = 1
        labels[i, len(e.prompt) : len(whole)] = whole[len(e.prompt) :]
    theirs = model(input_ids=ids, attention_mask=attention, labels=labels).loss
    theirs.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for budget in (100000, 200):
        world = World(torch.device("cpu"))
        passes = Passes(model, tokenizer.pad_token_id, budget, "auto", world)
        [mine] = sft.backward(passes, rows)
        torch.testing.assert_close(mine, theirs.detach())
        for p, gradient in zip(model.parameters(), wanted):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)
        model.zero_grad()


def test_accumulation_is_a_large_batch(tmp_path):
    for stage, config, model in (
        (sft, sft.SFTConfig, "tiny"),
        (reward, reward.RewardConfig, "tiny"),
    ):
        lines = []
        for budget in (100000, 300):
            folder = tmp_path / f"{stage.__name__}-{budget}"
            stage.train(config(model=model, output_dir=str(folder), token_budget=budget, **SHORT))
            lines.append(read_lines(folder))
        assert_close(*lines, 1e-3)


def test_the_results_load_in_plain_transformers(parents):
    tokenizer = AutoTokenizer.from_pretrained(parents / "sft" / "model")
    model = AutoModelForCausalLM.from_pretrained(parents / "sft" / "model")
    inputs = tokenizer("Tell me a story", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3
    scorer = AutoModelForSequenceClassification.from_pretrained(parents / "reward" / "model")
    assert scorer(**inputs).logits.shape == (1, 1)
    files = [p.name for p in (parents / "sft" / "model").iterdir()]
    assert "model.safetensors" in files
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in files)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES = {
    "gpt2": lambda v: GPT2Config(vocab_size=v, n_embd=32, n_layer=2, n_head=4),
    "qwen2-tied": lambda v: Qwen2Config(
        vocab_size=v, intermediate_size=64, num_key_value_heads=2, tie_word_embeddings=True, **SIZES
    ),
    "mistral": lambda v: MistralConfig(
        vocab_size=v, intermediate_size=64, num_key_value_heads=2, **SIZES
    ),
    "gemma": lambda v: GemmaConfig(
        vocab_size=v, intermediate_size=64, num_key_value_heads=1, head_dim=8, **SIZES
    ),
    "gemma2": lambda v: Gemma2Config(
        vocab_size=v, intermediate_size=64, num_key_value_heads=2, head_dim=8, **SIZES
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_whole_path_for_other_architectures(name, tmp_path):
    tokenizer = tiny_tokenizer()
    config = ARCHITECTURES[name](len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = None
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    short = {**SHORT, "num_steps": 1, "batch_size": 8, "eval_every": 0}
    base = str(tmp_path / "base")
    model = sft.train(sft.SFTConfig(model=base, output_dir=str(tmp_path / "sft"), **short))
    scorer = reward.train(
        reward.RewardConfig(model=str(model), output_dir=str(tmp_path / "reward"), **short)
    )
    ppo.train(
        ppo.PPOConfig(
            model=str(model),
            reward_model=str(scorer),
            output_dir=str(tmp_path / "ppo"),
            sampling=Sampling(max_new_tokens=8),
            eval_prompts=4,
            **short,
        )
    )
    first = next(x for x in read_lines(tmp_path / "ppo") if x["kind"] == "train")
    assert abs(first["rl/kl"]) < 1e-4
    assert first["rl/logprob_gap"] < 1e-5


def test_a_reward_model_with_another_tokenizer(ppo_config, parents, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|new|>"])
    other = reward.RewardConfig(
        model="tiny", output_dir=str(tmp_path / "other"), **{**SHORT, "num_steps": 1}
    )
    folder = reward.train(other)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(RunError, match="Set critic_model"):
        ppo.train(ppo_config("a", reward_model=str(folder)))
    critic = str(parents / "sft" / "model")
    ppo.train(ppo_config("b", reward_model=str(folder), critic_model=critic, num_steps=1))


def test_chat_messages_train(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Tell me a tale of fox {i}."}],
            "chosen": [{"role": "assistant", "content": "The fox smiled."}],
            "rejected": [{"role": "assistant", "content": "The fox cried all night."}],
        }
        for i in range(60)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(path=str(path), eval_size=4)
    short = {**SHORT, "data": data, "batch_size": 4, "num_steps": 2, "eval_every": 0}
    model = sft.train(sft.SFTConfig(model="tiny", output_dir=str(tmp_path / "sft"), **short))
    scorer = reward.train(
        reward.RewardConfig(model=str(model), output_dir=str(tmp_path / "rm"), **short)
    )
    ppo.train(
        ppo.PPOConfig(
            model=str(model),
            reward_model=str(scorer),
            output_dir=str(tmp_path / "ppo"),
            sampling=Sampling(max_new_tokens=6),
            **short,
        )
    )


def test_too_little_data_gets_a_sentence(tmp_path):
    config = sft.SFTConfig(
        model="tiny", output_dir=str(tmp_path / "a"), **{**SHORT, "batch_size": 5000}
    )
    with pytest.raises(RunError, match="rows for a batch of 5000"):
        sft.train(config)


def test_sequences_longer_than_the_model_get_a_sentence(ppo_config):
    with pytest.raises(RunError, match=r"take up to \d+ tokens, but the policy has 512 positions"):
        ppo.train(ppo_config(sampling=Sampling(max_new_tokens=510)))


def test_every_row_is_used_once_an_epoch():
    first = [i for step in range(3) for i in batch_rows(step, 12, batch_size=4, seed=0)]
    second = [i for step in range(3, 6) for i in batch_rows(step, 12, batch_size=4, seed=0)]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_a_prompt_with_several_pairs_is_answered_once():
    def example(prompt: list[int], chosen: list[int]) -> Example:
        return Example(Row("p"), prompt, chosen, [])

    a, b, c = example([1, 2], [3]), example([1, 2], [4]), example([5], [6])
    assert each_prompt_once([a, b, c]) == [a, c]


def test_held_out_prompts_that_are_too_long_do_not_stop_training(tmp_path, monkeypatch, capfd):
    short, long = Row("a fox", " smiled", " cried"), Row("fox " * 900, " smiled", " cried")
    loaded = Loaded([short], [long], Counts())
    monkeypatch.setattr("marlhf.runtime.stage.load_data", lambda *_, **__: loaded)
    config = sft.SFTConfig(model="tiny", output_dir=str(tmp_path / "a"), **SHORT)
    examples, held_out = load_examples(config.data, "sft", tiny_tokenizer(), needs=("chosen",))
    assert (len(examples), held_out) == (1, [])
    assert "None of the 1 prompts fits" in capfd.readouterr().err
