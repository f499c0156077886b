"""Key points in mirrored images are reported if left and right are not swapped."""

from pathlib import Path

import pytest

import phasetrain

FACES = """
import torch


class Faces(torch.utils.data.Dataset):
    def __init__(self, points: int = 2):
        self.points = points

    def __len__(self):
        return 32

    def __getitem__(self, index):
        points = torch.tensor([[2.0 + n + index % 3, 2.0, 2.0] for n in range(self.points)])
        return {"image": torch.rand(1, 8, 8), "eyes": points, "label": index % 2}
"""


def list_warnings(folder: Path, eyes: str, transforms: str, points: int) -> list[str]:
    fields = f"{{image: image, eyes: {eyes}, label: value}}"
    data = (
        f"{{dataset: faces.Faces, points: {points}, batch_size: 8, inputs: image, "
        f"targets: label, fields: {fields}, transforms: {transforms}}}"
    )
    words = ["experiment=null", f"DATA.TRAIN={data}", f"DATA.TEST={data}", "MODEL.name=mlp"]
    phasetrain.run(
        [
            *words,
            "MODEL.classes=2",
            "MODEL.input_shape=[1,8,8]",
            "PHASES.epochs=1",
            f"RUN.dir={folder}",
        ]
    )
    lines = (folder / "log.txt").read_text().splitlines()
    return [line for line in lines if "a transform mirrors images" in line]


@pytest.mark.feature(
    "fields.mirror",
    "mirrored images whose left and right key points are not swapped are reported",
    "`DATA.*.fields.NAME.mirror`",
)
@pytest.mark.parametrize(
    ("eyes", "transforms", "points", "is_reported"),
    [
        ("keypoints", "[random_flip]", 2, True),
        ("keypoints", "[{name: apply, transforms: [random_flip]}]", 2, True),
        ("{kind: keypoints, mirror: [1, 0]}", "[random_flip]", 2, False),
        ("{kind: keypoints, mirror: []}", "[random_flip]", 2, False),
        ("keypoints", "[random_flip]", 1, False),
        ("keypoints", "[{name: random_flip, probability: 0.0}]", 2, False),
        ("keypoints", "[{name: random_shift, pixels: 1}]", 2, False),
        ("value", "[random_flip]", 2, False),
    ],
)
def test_mirrored_key_points_are_reported_once_before_the_first_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eyes: str,
    transforms: str,
    points: int,
    *,
    is_reported: bool,
) -> None:
    (tmp_path / "faces.py").write_text(FACES)
    monkeypatch.syspath_prepend(tmp_path)
    lines = list_warnings(tmp_path / "run", eyes, transforms, points)
    assert [line.count("DATA.TRAIN.fields.eyes, DATA.TEST.fields.eyes") for line in lines] == (
        [1] * is_reported
    )
