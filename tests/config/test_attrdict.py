import copy
import pickle

import pytest

from phasetrain.config.attrdict import AttrDict

CONFIG = AttrDict({"OPTIMIZER": {"lr": 0.1, "betas": [0.9, {"a": 1}]}, "RUN": {"seed": 0}})


def test_keys_are_attributes_at_every_depth() -> None:
    assert CONFIG.OPTIMIZER.lr == 0.1
    assert CONFIG["OPTIMIZER"]["lr"] == 0.1
    assert CONFIG.OPTIMIZER.betas[1].a == 1


def test_unknown_key_raises_with_section_and_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"'lrr' .*OPTIMIZER.*'lr'"):
        _ = CONFIG.OPTIMIZER.lrr
    with pytest.raises(AttributeError, match=r"'RUM' .*'RUN'"):
        _ = CONFIG.RUM
    with pytest.raises(AttributeError, match=r"'b' .*OPTIMIZER\.betas\[1\]$"):
        _ = CONFIG.OPTIMIZER.betas[1].b


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.__setitem__("seed", 1),
        lambda c: setattr(c, "seed", 1),
        lambda c: c.__delitem__("seed"),
        lambda c: delattr(c, "seed"),
        lambda c: c.update(seed=1),
        lambda c: c.pop("seed"),
        lambda c: c.popitem(),
        lambda c: c.clear(),
        lambda c: c.setdefault("x", 1),
        lambda c: c.__ior__({"x": 1}),
    ],
)
def test_config_cannot_be_changed(change) -> None:
    with pytest.raises(TypeError, match="RUN "):
        change(CONFIG.RUN)
    assert CONFIG.RUN == {"seed": 0}


def test_lists_become_tuples_and_plain_converts_them_back() -> None:
    assert isinstance(CONFIG.OPTIMIZER.betas, tuple)
    plain = CONFIG.plain()
    assert plain == {"OPTIMIZER": {"lr": 0.1, "betas": [0.9, {"a": 1}]}, "RUN": {"seed": 0}}
    assert type(plain["OPTIMIZER"]) is dict
    plain["OPTIMIZER"]["lr"] = 3
    assert CONFIG.OPTIMIZER.lr == 0.1


def test_copies_and_pickles_keep_content_and_path() -> None:
    for other in (copy.deepcopy(CONFIG), pickle.loads(pickle.dumps(CONFIG))):
        assert other == CONFIG
        with pytest.raises(AttributeError, match=r"'lrr' .*OPTIMIZER"):
            _ = other.OPTIMIZER.lrr
