"""Rows of prompts and preferences: read, checked, split by prompt, encoded, padded."""

from marlhf.data.collate import pad_left, pad_right, token_budget_batches
from marlhf.data.encode import (
    Encoded,
    decode,
    encode_prompt,
    encode_prompts,
    encode_response,
    encode_responses,
    fit_prompts,
)
from marlhf.data.files import read_hub, read_records
from marlhf.data.load import DataConfig, Loaded, held_out, load_data, rows_from_records, split_rows
from marlhf.data.rows import Counts, DataError, Message, Row, Text, prompt_key

# fmt: off
__all__ = [
    "Counts", "DataConfig", "DataError", "Encoded", "Loaded", "Message", "Row", "Text", "decode",
    "encode_prompt", "encode_prompts", "encode_response", "encode_responses", "fit_prompts",
    "held_out", "load_data", "pad_left", "pad_right", "prompt_key", "read_hub", "read_records",
    "rows_from_records", "split_rows", "token_budget_batches",
]
# fmt: on
