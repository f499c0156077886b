from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.models import MODELS


def test_facts_fill_parameters_of_the_model():
    used = {}
    model = MODELS.build(
        "mlp", {"hidden": [3]}, facts={"classes": 2, "input_shape": (4,), "channels": 9}, used=used
    )
    assert used == {"MODEL.classes": 2, "MODEL.input_shape": (4,)}
    assert sum(p.numel() for p in model.parameters()) == 4 * 3 + 3 + 3 * 2 + 2


def test_unknown_name_gets_a_suggestion():
    with raises(
        ConfigError,
        code="config.unknown_part",
        key="MODEL.name",
        given="'smallcnn'",
        suggestion="small_cnn",
    ):
        MODELS.find("smallcnn")
