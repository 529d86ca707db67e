"""What the published work says of TRL, of the TRL that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

trl = pytest.importorskip("trl")


def test_trl_refuses_a_batch_that_groups_do_not_divide(tmp_path: Path):
    given = {"num_generations": 4, "use_cpu": True, "bf16": False, "report_to": "none"}
    with pytest.raises(ValueError, match="divisible"):
        trl.GRPOConfig(str(tmp_path), per_device_train_batch_size=3, **given)
    trl.GRPOConfig(str(tmp_path), per_device_train_batch_size=4, **given)
