"""Extraction and probes on a CUDA device; skipped, with the reason, where there is none."""

from pathlib import Path

import pytest
import torch
from harness import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.addon("deploy")
def test_features_and_probes(tmp_path: Path) -> None:
    from phasetrain.addons.deploy.extract.feature_files import read_columns
    from phasetrain.addons.deploy.extract.linear_probe import ProbeSettings, probe

    found = {}
    for device in ("cuda", "cpu"):
        words = (f"MACHINE.device={device}", "RUN.checkpoint=none", "DATA.TRAIN.transforms=[]")
        out = f"{tmp_path}/{device}"
        train(
            tmp_path / "run",
            "RUN.engine=extract",
            f"EXTRACT.dir={out}",
            "EXTRACT.layers=[dropout]",
            *words,
        )
        features = read_columns(f"{out}/test", ["dropout"])["dropout"]
        settings = ProbeSettings("dropout", penalties=(1e-2,), device=device)
        found[device] = features, probe(f"{out}/train", f"{out}/test", settings)
    assert torch.allclose(found["cuda"][0], found["cpu"][0], atol=1e-3)
    assert found["cuda"][1].linear == pytest.approx(found["cpu"][1].linear, abs=0.02)
    assert found["cuda"][1].neighbours[5] == pytest.approx(found["cpu"][1].neighbours[5], abs=0.02)
