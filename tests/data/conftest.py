from pathlib import Path

import pytest

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WORDS = "Human: what is DVT?\n\nAssistant: It is a clot. POST TL;DR: user system hello world "


@pytest.fixture
def make_tokenizer():
    """A small byte-level BPE tokenizer; any mix of BOS, trailing EOS and chat template."""

    def make(*, bos=False, eos_behind=False, template=None, metaspace=False):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
        from transformers import PreTrainedTokenizerFast

        special = ["<|im_end|>", "<s>", "<|im_start|>"]
        tokenizer = Tokenizer(models.BPE(unk_token=None))
        if metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
            tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
            alphabet = sorted(set(WORDS) | {"▁"})
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([WORDS] * 4, trainer)
        if bos or eos_behind:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=("<s> " if bos else "") + "$A" + (" <|im_end|>" if eos_behind else ""),
                special_tokens=[("<s>", 1), ("<|im_end|>", 0)],
            )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="<|im_end|>",
            pad_token="<|im_end|>",
            extra_special_tokens=["<|im_start|>"],
        )
        fast.chat_template = template
        return fast

    return make


@pytest.fixture
def chatml():
    return CHATML


@pytest.fixture
def shared_data():
    """Real data beside the repository; not part of it, so tests that want it may be skipped."""
    folder = Path(__file__).parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real data is not on this machine")
    return folder
