import json
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from marlhf.core import NGram, Words
from marlhf.data import DataConfig
from marlhf.runs.layout import RunError
from marlhf.runs.write import RunFolder
from marlhf.runtime.distributed import World
from marlhf.runtime.loop import open_run
from marlhf.runtime.publish import push, write_card
from marlhf.train.supervised_config import SFTConfig


@dataclass
class Settings:
    model: str
    output_dir: str
    data: DataConfig
    seed: int = 3
    batch_size: int = 64
    learning_rate: float = 1e-5
    kl_coef: float = 0.05
    reward_model: str = ""
    segmenter: object = field(default_factory=NGram)
    hub_token: str = "hf_secretsecret"


@pytest.fixture
def make(tmp_path):
    """`make("ppo", model=...)`: a finished run with a model folder, and its config."""

    def build(name="ppo", stage="ppo", architecture="LlamaForCausalLM", **changes):
        data = changes.pop("data", DataConfig(source="hh"))
        path = tmp_path / name
        settings = {"model": "Qwen/Qwen2.5-0.5B", "output_dir": str(path), "data": data, **changes}
        run = RunFolder(path, stage, Settings(**settings))
        run.model.mkdir()
        (run.model / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        run.log("eval", 0, {"eval/score": 0.25, "eval/kl": 0.0, "eval/length": 30.0})
        run.log("train", 1, {"rl/score": 0.3})
        after = {"eval/score": 1.5, "eval/kl": 8.25, "eval/length": 41.0, "steps": 120}
        run.finish("finished", after)
        return run

    return build


def read(path):
    """The metadata and the text of a card."""
    _, metadata, text = path.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_a_card_states_data_settings_results_and_how_to_cite(make):
    metadata, text = read(write_card(make(), rows={"training": 1000, "held-out": 50}))
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["marlhf", "rlhf", "ppo", "macro-actions"],
        "base_model": "Qwen/Qwen2.5-0.5B",
        "datasets": ["Dahoas/full-hh-rlhf"],
    }
    assert "[Dahoas/full-hh-rlhf](https://huggingface.co/datasets/Dahoas/full-hh-rlhf)" in text
    assert "1000 training rows, 50 held-out rows" in text
    assert "`{type: ngram, n: 5}`" in text
    assert "| `kl_coef` | `0.05` |" in text
    assert "| score | 0.25 | 1.5 |" in text
    assert "| KL to the reference (nats per response) | 0 | 8.25 |" in text
    assert "| length (tokens) | 30 | 41 |" in text
    assert re.search(r"120 steps, \d+ seconds, one run with seed 3", text)
    assert 'AutoModelForCausalLM.from_pretrained("ppo")' in text
    assert "https://arxiv.org/abs/2410.02743" in text
    assert "Chai, Yekun and Sun, Haoran and Fang, Huang" in text
    assert "@software{marlhf" in text
    assert re.search(r"- transformers \d", text)


def test_hugging_face_reads_the_metadata(make):
    from huggingface_hub import ModelCard

    card = ModelCard.load(write_card(make()))
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert card.data.datasets == ["Dahoas/full-hh-rlhf"]


def test_no_path_and_no_secret_gets_out(make, tmp_path):
    rows = tmp_path / "private" / "rows.jsonl"
    reward = make("reward", "reward", architecture="LlamaForSequenceClassification")
    run = make(
        "ppo",
        reward_model=str(reward.model),
        data=DataConfig(source="local", path=str(rows)),
        segmenter=Words(),
    )
    run.state["note"] = f"Stopped early, saved in {run.path}/model at step 3."
    card = write_card(run)
    whole = card.read_text(encoding="utf-8")
    assert str(tmp_path) not in whole
    assert tmp_path.name not in whole
    assert "private" not in whole
    assert "hf_secret" not in whole
    assert "hub_token" not in whole
    metadata, text = read(card)
    assert "datasets" not in metadata
    assert "`rows.jsonl` (form: local)" in text
    assert "| `reward_model` | `reward` |" in text
    assert "Stopped early, saved in ppo at step 3." in text


def test_the_base_is_what_the_first_run_began_with(make):
    sft = make("sft", "sft")
    metadata, text = read(write_card(make("ppo", model=str(sft.model))))
    assert metadata["base_model"] == "Qwen/Qwen2.5-0.5B"
    assert "start: `sft`, which began as [Qwen/Qwen2.5-0.5B]" in text


@pytest.mark.parametrize(
    ("model", "base"), [("tiny", None), ("gpt2", "gpt2"), ("/models/own.gguf", None), ("", None)]
)
def test_only_what_is_on_the_hub_is_a_base_model(make, model, base):
    metadata, text = read(write_card(make(model=model, data=DataConfig(source="toy"))))
    assert metadata.get("base_model") == base
    assert "datasets" not in metadata
    assert "/models" not in text


def test_objects_are_named_by_the_caller(make):
    run = make(model="", data=DataConfig(source="toy"))
    metadata, text = read(write_card(run, base_model="org/base", dataset="rows from Python"))
    assert metadata["base_model"] == "org/base"
    assert "datasets" not in metadata
    assert "data: `rows from Python`" in text
    assert "toy" not in text.split("<details>")[0]


def test_reward_models_load_with_their_head(make):
    run = make("rm", "reward", architecture="LlamaForSequenceClassification", segmenter=None)
    metadata, text = read(write_card(run, repo_id="me/my-rm"))
    assert metadata["pipeline_tag"] == "text-classification"
    assert metadata["tags"] == ["marlhf", "rlhf", "reward-model"]
    assert 'AutoModelForSequenceClassification.from_pretrained("me/my-rm")' in text
    assert text.lstrip().startswith("# my-rm")
    assert "macro" not in text.split("## How to cite")[0]


def test_adapters_load_with_peft(make):
    run = make("lora")
    (run.model / "config.json").unlink()
    (run.model / "adapter_config.json").write_text("{}")
    metadata, text = read(write_card(run))
    assert metadata["library_name"] == "peft"
    assert "from peft import AutoPeftModelForCausalLM" in text
    assert "an adapter over `Qwen/Qwen2.5-0.5B`" in text
    assert re.search(r"- peft \d", text)


def test_the_code_of_a_card_runs(make, small, trained, capsys):
    run = make()
    small("llama", vocab_size=300).save_pretrained(run.model)
    trained("byte-level").save_pretrained(run.model)
    code = re.search(r"```python\n(.*?)```", write_card(run).read_text(), re.DOTALL).group(1)
    exec(code.replace('"ppo"', repr(str(run.model))).replace("=64", "=4"), {})
    assert "a prompt" in capsys.readouterr().out


def test_one_token_actions_are_plain_ppo(make):
    metadata, text = read(write_card(make(segmenter=NGram(1))))
    assert "macro-actions" not in metadata["tags"]
    assert "cut into macro actions" not in text


def test_a_run_without_evaluations_has_a_card(make):
    run = make()
    (run.path / "metrics.jsonl").unlink()
    run.state["summary"] = {"eval/score": float("nan"), "steps": 5}
    _, text = read(write_card(run))
    assert "| score | - | - |" in text
    assert "5 steps" in text


class Hub:
    """A stand-in for HfApi that remembers, or fails."""

    calls: list
    error: Exception | None = None

    def __init__(self, token=None):
        Hub.calls = [("token", token)]

    def create_repo(self, repo_id, **given):
        if Hub.error:
            raise Hub.error
        Hub.calls.append(("create", repo_id, given))
        owned = repo_id if "/" in repo_id else f"me/{repo_id}"

        class Url(str):
            repo_id = owned

        return Url(f"https://huggingface.co/{owned}")

    def upload_folder(self, **given):
        Hub.calls.append(("upload", given))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "error", None)
    return Hub


def test_push_makes_the_repository_and_uploads_the_folder(hub, tmp_path):
    where = push(tmp_path, "my-model", private=True, token="t", message="Step 5")
    assert where == "https://huggingface.co/me/my-model"
    token, create, upload = hub.calls
    assert token == ("token", "t")
    options = {"private": True, "repo_type": "model", "exist_ok": True}
    assert create == ("create", "my-model", options)
    assert upload[1]["repo_id"] == "me/my-model"
    assert upload[1]["folder_path"] == str(tmp_path)
    assert upload[1]["commit_message"] == "Step 5"


def refusal(status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"{status} Client Error", response=response)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HFValidationError("bad"), "no name for a repository. Write owner/name"),
        (refusal(401), "hf auth login"),
        (refusal(403), "may not write to me/model"),
        (refusal(500), "could not be reached (HfHubHTTPError: 500 Client Error)"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (ConnectionError("no route\nmore"), "could not be reached (ConnectionError: no route)"),
    ],
)
def test_what_keeps_a_model_from_the_hub_is_a_sentence(hub, tmp_path, monkeypatch, error, said):
    monkeypatch.setattr(hub, "error", error)
    with pytest.raises(RunError) as caught:
        push(tmp_path, "me/model")
    assert said in str(caught.value)
    assert f"hf upload me/model {tmp_path}" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [(refusal(401), "hf auth login"), (HFValidationError("bad"), "no name for a repository")],
)
def test_a_model_that_cannot_be_pushed_is_not_trained(hub, tmp_path, monkeypatch, error, said):
    config = SFTConfig(model="tiny", output_dir=str(tmp_path / "sft"), push_to_hub=True)
    monkeypatch.setattr(hub, "error", error)
    with pytest.raises(RunError, match=f"push_to_hub cannot work: .*{said}"):
        open_run(config, "sft", World(torch.device("cpu")))
    monkeypatch.setattr(hub, "error", None)
    open_run(config, "sft", World(torch.device("cpu"))).release()
    assert hub.calls[1][:2] == ("create", "sft")
