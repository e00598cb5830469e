import os

import torch
from safetensors.torch import save_file

from marlhf.runs.atomic import replace_folder


def test_weights_are_as_readable_as_other_files(tmp_path):
    """safetensors makes files for their owner alone; a group that shares a disk needs them."""
    temporary = tmp_path / ".model"
    temporary.mkdir()
    save_file({"x": torch.zeros(2)}, temporary / "model.safetensors")
    (temporary / "model.safetensors").chmod(0o600)
    before = os.umask(0o027)
    try:
        replace_folder(temporary, tmp_path / "model")
    finally:
        os.umask(before)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == 0o640
