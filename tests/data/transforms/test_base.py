import numpy as np
import pytest
import torch

from phasetrain.data.transforms import (
    TRANSFORMS,
    BatchTransform,
    Flatten,
    Keys,
    Noise,
    Pipeline,
    RandomShift,
)
from phasetrain.data.transforms.base import mix64
from phasetrain.errors import ConfigError

PARAMETERS = {
    "center_crop": {"size": 6},
    "flatten": {},
    "noise": {"std": 0.1},
    "normalize": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.7]},
    "random_crop": {"size": 7, "padding": 1},
    "random_erase": {"probability": 0.5},
    "random_flip": {},
    "random_rotate": {"degrees": 20.0},
    "random_resized_crop": {"size": 7},
    "random_shift": {"pixels": 2},
    "random_solarize": {},
    "resize": {"size": 5},
}
RANDOM = [
    "noise",
    "random_crop",
    "random_erase",
    "random_flip",
    "random_resized_crop",
    "random_rotate",
    "random_shift",
    "random_solarize",
]


OF_VISION = {"random_erase", "random_resized_crop", "random_rotate", "random_solarize"}


def as_params(names):
    """Return names of transforms that are skipped without the add-on that has them."""
    return [
        pytest.param(name, marks=[pytest.mark.addon("vision")] if name in OF_VISION else [])
        for name in names
    ]


def keys(count, first=0):
    return Keys(np.arange(first, first + count))


def images(count):
    return torch.rand(count, 3, 9, 8, generator=torch.Generator().manual_seed(0))


def test_hash_is_the_finalizer_of_splitmix64():
    words = mix64(np.array([0, 1, 0x9E3779B97F4A7C15], dtype=np.uint64))
    # The last is the first output of the reference implementation for seed 0.
    assert words.tolist() == [0, 6238072747940578789, 0xE220A8397B1DCDAF]


def test_draws_have_these_values():
    assert keys(2).uniform(2) == pytest.approx(
        np.array([[0.88331081, 0.431528], [0.74974824, 0.37239342]])
    )
    assert keys(2).integers(-5, 5, 4).tolist() == [[3, -1, -5, 4], [2, -2, -1, 4]]
    assert keys(2).normal(2) == pytest.approx(
        np.array([[2.04427216, 1.04509142], [-1.54092049, 0.92540274]])
    )
    assert keys(3).make_seeds() == [1147451971861773085, 6341381771719634799, 13434602874898491736]
    assert keys(2).fork(0).values.tolist() == [8417946794308840489, 10277734745068009885]
    assert keys(2).fork(1).values.tolist() == [9873879188606010543, 4128231651836605960]


def test_draws_have_one_row_per_key():
    assert keys(3).uniform().shape == (3,)
    assert keys(3).normal(2, 5).shape == (3, 2, 5)
    assert keys(3).integers(0, 4).dtype == np.int64
    assert keys(0).uniform(2).shape == (0, 2)
    assert len(keys(3)) == 3


def test_draws_are_reproducible_and_a_fork_draws_others():
    drawn = keys(4)
    assert np.array_equal(drawn.uniform(3), drawn.uniform(3))
    assert not np.array_equal(drawn.uniform(3), drawn.fork(0).uniform(3))


@pytest.mark.parametrize(
    "draw", [lambda k: k.uniform(3), lambda k: k.normal(3), lambda k: k.integers(0, 9, 3)]
)
def test_draw_does_not_depend_on_the_batch(draw):
    whole = draw(keys(67))
    for count in (1, 5, 8, 67):
        assert np.array_equal(whole[:count], draw(keys(count)))
    assert np.array_equal(whole[40], draw(Keys([40]))[0])


def test_uniform_draws_have_the_moments_and_range():
    drawn = keys(20000).uniform(4)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.mean(0) == pytest.approx(np.full(4, 0.5), abs=0.01)
    assert drawn.var(0) == pytest.approx(np.full(4, 1 / 12), abs=0.002)


def test_normal_draws_have_the_moments():
    drawn = keys(20000).normal(2)
    assert drawn.mean(0) == pytest.approx(np.zeros(2), abs=0.03)
    assert drawn.var(0) == pytest.approx(np.ones(2), abs=0.04)
    assert (drawn**4).mean() == pytest.approx(3, abs=0.2)


def test_integers_are_uniform_in_their_range():
    counts = np.bincount(keys(20000).integers(-3, 4) + 3)
    assert len(counts) == 7
    assert counts == pytest.approx(np.full(7, 20000 / 7), abs=200)


def test_streams_positions_and_neighbours_are_uncorrelated():
    base = keys(20000)
    columns = [
        *base.uniform(3).T,
        base.fork(0).uniform(),
        base.fork(1).uniform(),
        base.fork(0).fork(0).uniform(),
    ]
    columns += [
        keys(20000, first=1).uniform(),
        base.normal(),
        np.array(base.make_seeds(), dtype=np.float64),
    ]
    matrix = np.corrcoef(columns)
    # `normal` is made of the first two draws of the same stream: the one pair that is related by
    # design.
    matrix[7, :3] = matrix[:3, 7] = 0
    assert np.abs(matrix - np.eye(len(columns))).max() < 0.03


def test_correlated_draws_fail_the_check():
    drawn = keys(20000).uniform(2)
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 0] + drawn[:, 1])[0, 1]) > 0.5


@pytest.mark.parametrize("bounds", [(0, 0), (3, 2), (0, 2**41)])
def test_ranges_without_a_uniform_draw_are_rejected(bounds):
    with pytest.raises(ValueError, match=str(bounds[1])):
        keys(2).integers(*bounds)


def test_keys_with_two_dimensions_are_rejected():
    with pytest.raises(ValueError, match=r"\(N,\).*\(2, 2\)"):
        Keys(np.zeros((2, 2)))


@pytest.mark.addon("vision")
def test_every_built_in_transform_is_tested_here():
    own = {name for name in TRANSFORMS if TRANSFORMS[name].__module__.startswith("phasetrain.")}
    # The last ones take other transforms, or square images, and have files of their own.
    assert own - {"multi_crop"} == {*PARAMETERS, "apply", "on_fields", "rotate"}


def samples_are_independent(transform):
    batch, drawn = images(8), keys(8)
    alone = [transform(batch[i : i + 1], Keys(drawn.values[i : i + 1])) for i in range(8)]
    return torch.equal(transform(batch, drawn), torch.cat(alone))


@pytest.mark.parametrize("name", as_params(PARAMETERS))
def test_batch_is_bit_identical_to_its_samples(name):
    assert samples_are_independent(TRANSFORMS.build(name, PARAMETERS[name]))


@pytest.mark.parametrize(
    "leaking",
    [
        lambda batch, keys: batch - batch.mean(),
        lambda batch, keys: batch * torch.arange(len(batch))[:, None, None, None],
    ],
)
def test_transform_that_depends_on_the_batch_fails_the_check(leaking):
    assert not samples_are_independent(leaking)


@pytest.mark.parametrize("name", as_params(PARAMETERS))
def test_input_batch_is_not_modified(name):
    batch = images(8)
    TRANSFORMS.build(name, PARAMETERS[name])(batch, keys(8))
    assert torch.equal(batch, images(8))


@pytest.mark.parametrize("name", as_params(PARAMETERS))
def test_result_depends_on_the_keys_alone(name):
    transform = TRANSFORMS.build(name, PARAMETERS[name])
    torch.manual_seed(0)
    first = transform(images(8), keys(8))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, transform(images(8), keys(8)))
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, transform(images(8), keys(8, first=100))) == (name not in RANDOM)


def test_pipeline_forks_the_keys_for_each_transform():
    pipeline = Pipeline([RandomShift(1), Noise(0.5)])
    drawn = keys(8)
    expected = Noise(0.5)(RandomShift(1)(images(8), drawn.fork(0)), drawn.fork(1))
    assert torch.equal(pipeline(images(8), drawn), expected)


@pytest.mark.addon("vision")
def test_pipeline_is_bit_identical_for_a_sample_and_its_batch():
    pipeline = Pipeline([TRANSFORMS.build(name, PARAMETERS[name]) for name in RANDOM])
    batch, drawn = images(8), keys(8)
    whole = pipeline(batch, drawn)
    for i in range(8):
        assert torch.equal(
            pipeline.transform_sample(batch[i], Keys(drawn.values[i : i + 1])), whole[i]
        )


def test_plain_callables_get_single_samples():
    pipeline = Pipeline(
        [lambda values: torch.tensor(values).view(1, 2, 1), Flatten(), lambda sample: sample + 1]
    )
    assert not pipeline.is_batched
    assert pipeline.transform_sample([1.0, 2.0], Keys([0])).tolist() == [2.0, 3.0]
    assert pipeline.shape_after((1, 2)) is None
    with pytest.raises(TypeError, match=r"transform 0 \(<lambda>\)"):
        pipeline(torch.zeros(1, 2), Keys([0]))


def test_batch_transform_of_a_list_is_rejected():
    with pytest.raises(TypeError, match=r"transform 0 \(Flatten\).*\blist\b"):
        Pipeline([Flatten()]).transform_sample([1, 2], Keys([0]))


def test_pipeline_computes_the_shape_afterwards():
    crop = TRANSFORMS.build("random_crop", {"size": 4})
    assert Pipeline([crop, Flatten()]).shape_after((3, 8, 8)) == (48,)
    assert Pipeline().shape_after((3, 8, 8)) == (3, 8, 8)
    assert Pipeline().is_batched


@pytest.mark.parametrize("name", as_params(sorted(set(PARAMETERS) - {"flatten", "noise"})))
def test_image_transforms_reject_vectors(name):
    with pytest.raises(ValueError, match=r"\(N, C, H, W\).*\(2, 5\)"):
        TRANSFORMS.build(name, PARAMETERS[name])(torch.zeros(2, 5), keys(2))


def test_custom_transform_is_one_class():
    class Negate(BatchTransform):
        def __call__(self, batch, keys):
            return -batch

    assert Pipeline([Negate()])(torch.ones(1, 2), keys(1)).tolist() == [[-1.0, -1.0]]


def test_errors_of_parameters_name_the_section():
    with pytest.raises(ConfigError, match=r"DATA.TRAIN.transforms\[0\] .*pixels = -1"):
        TRANSFORMS.build("random_shift", {"pixels": -1}, where="DATA.TRAIN.transforms[0]")
