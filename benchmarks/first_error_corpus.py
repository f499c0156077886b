"""Broken configs with their expected correction, and valid configs; see `first_error.py`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

BROKEN, GOOD = 200, 50

BASE = (
    "PHASES.limit.train=2",
    "PHASES.limit.test=1",
    "MODEL.name=small_cnn",
    "MODEL.width=4",
    "HOOKS.console=null",
)
LENGTH = "PHASES.epochs=1"


@dataclass(frozen=True)
class Case:
    """A config to start.

    Attributes:
        kind: kind of mistake.
        words: overrides; `{here}` is its folder.
        own: the overrides that contain the mistake.
        fixes: acceptable first suggestions; empty for a valid config.
        meant: the correction is the nearest name, so it must be the first `did you mean`.
    """

    kind: str
    words: tuple[str, ...]
    own: tuple[str, ...]
    fixes: tuple[str, ...] = ()
    meant: bool = False


Row = tuple[str | tuple[str, ...], str | tuple[str, ...]]
"""The words of a broken config, and its corrections."""

KEYS = {
    "PHASES.epochs": "3",
    "PHASES.updates": "7",
    "PHASES.test_first": "true",
    "PHASES.limit.train": "2",
    "PHASES.test_every.epochs": "1",
    "PHASES.train_meters": "true",
    "DATA.TRAIN.batch_size": "32",
    "DATA.TRAIN.workers": "0",
    "DATA.TRAIN.drop_last": "true",
    "DATA.TRAIN.sampler": "shuffled",
    "DATA.TRAIN.transforms": "[]",
    "DATA.TRAIN.micro_batch_size": "16",
    "DATA.TEST.batch_size": "64",
    "OPTIMIZER.clip_norm": "1.0",
    "OPTIMIZER.accumulate": "2",
    "OPTIMIZER.momentum": "0.9",
    "OPTIMIZER.weight_decay": "1e-4",
    "OPTIMIZER.nesterov": "true",
    "OPTIMIZER.SCHEDULES.lr.warmup": "0.1",
    "MODEL.width": "4",
    "MODEL.dropout": "0.1",
    "MODEL.weights": "null",
    "LOSS.label_smoothing": "0.1",
    "METERS.accuracy.topk": "1",
    "CHECKPOINT.every_updates": "2",
    "CHECKPOINT.every_epochs": "1",
    "CHECKPOINT.keep_last": "3",
    "CHECKPOINT.best.monitor": "test/accuracy",
    "CHECKPOINT.background": "true",
    "MACHINE.precision": "fp32",
    "MACHINE.threads": "1",
    "MACHINE.deterministic": "true",
    "DISTRIBUTED.strategy": "ddp",
    "DISTRIBUTED.timeout_seconds": "60",
    "RUN.resume": "auto",
    "RUN.seed": "3",
    "RUN.imports": "[]",
    "LAUNCH.minutes": "30",
    "HOOKS.metrics.every_updates": "5",
    "HOOKS.watchdog.seconds": "600",
}

NAMES = {
    "MODEL.name={}": ("small_cnn", "resnet_cifar", "mlp", "transformer"),
    "LOSS.name={}": ("cross_entropy", "soft_targets", "CrossEntropyLoss"),
    "OPTIMIZER.name={}": ("adamw", "RMSprop", "lamb", "Adagrad"),
    "OPTIMIZER.SCHEDULES.lr.name={}": (
        "cosine",
        "polynomial",
        "one_cycle",
        "multistep",
        "exponential",
    ),
    "DATA.TRAIN.dataset={}": ("digits", "synthetic", "image_folder"),
    "DATA.TRAIN.sampler={}": ("shuffled", "stratified", "weighted", "sequential"),
    "DATA.TRAIN.transforms=[{{name: {}}}]": (
        "random_shift",
        "random_crop",
        "normalize",
        "random_flip",
    ),
    "DATA.TRAIN.batch_transforms=[{{name: {}}}]": ("mixup", "cutmix"),
    "METERS.mine={{name: {}}}": ("confusion_matrix", "per_class_accuracy", "auroc"),
    "HOOKS.mine={{name: {}}}": ("early_stopping", "tensorboard", "numerics"),
    "DISTRIBUTED.strategy={}": ("sharded_ddp", "fsdp", "zero"),
    "TASK.name={}": ("supervised", "self_supervised", "distillation"),
    "experiment={}": ("digits", "digits_simclr", "text_tiny"),
    "OPTIMIZER={}": ("adamw",),
    "MODEL={}": ("resnet20", "small_cnn"),
}

HABITS: Sequence[Row] = (  # what the same thing is called elsewhere
    ("OPTIMIZER.learning_rate=0.1", "OPTIMIZER.lr"),
    ("DATA.TRAIN.num_workers=2", "DATA.TRAIN.workers"),
    ("DATA.TRAIN.batchsize=32", "DATA.TRAIN.batch_size"),
    ("PHASES.num_epochs=3", "PHASES.epochs"),
    ("PHASES.max_epochs=3", "PHASES.epochs"),
    ("TRAINER.max_epochs=3", "PHASES.epochs"),
    ("epochs=3", "PHASES.epochs"),
    ("lr=0.1", "OPTIMIZER.lr"),
    ("batch_size=32", "DATA.TRAIN.batch_size"),
    ("SEED=1", "RUN.seed"),
    ("MACHINE.seed=1", "RUN.seed"),
    ("OPTIMIZER.gradient_clip_norm=1.0", "OPTIMIZER.clip_norm"),
    ("OPTIMIZER.accumulate_grad_batches=2", "OPTIMIZER.accumulate"),
    ("CHECKPOINT.monitor=test/accuracy", "CHECKPOINT.best.monitor"),
    ("MODEL.drop_out=0.1", "MODEL.dropout"),
    ("LOSS.smoothing=0.1", "LOSS.label_smoothing"),
    ("optimizer.lr=0.1", "OPTIMIZER.lr"),
    ("DATA.TRAIN.TRANSFORMS=[]", "DATA.TRAIN.transforms"),
    ("OPTIMIZER.batch_size=32", "DATA.TRAIN.batch_size"),
    ("MACHINE.workers=2", "DATA.TRAIN.workers"),
    ("DATA.TRAIN.name=digits", "DATA.TRAIN.dataset"),
)

VALUES: Sequence[Row] = (
    ("OPTIMIZER.lr=fast", "expected float"),
    ("OPTIMIZER.lr=-0.1", "expected float >= 0"),
    ("PHASES.epochs=1.5", "expected int"),
    ("PHASES.epochs=ten", "expected int"),
    ("PHASES.epochs=-1", "expected int >= 0"),
    ("DATA.TRAIN.batch_size=0", "expected int >= 1"),
    ("DATA.TRAIN.batch_size='64'", "expected int"),
    ("DATA.TRAIN.workers=-1", "expected int >= 0"),
    ("DATA.TRAIN.workers=100000", "<= 1024"),
    ("PHASES.epochs=100000000000000000000000", "<= 1000000"),
    ("DATA.TRAIN.drop_last=maybe", "expected bool"),
    ("DATA.TRAIN.transforms=random_shift", "expected list"),
    ("DATA.TRAIN.start_method=thread", "'fork' or 'spawn'"),
    ("MACHINE.precision=fp8", "'fp32' or"),
    ("MACHINE.precision=bfloat16", "'bf16'"),
    ("MACHINE.precision=16", "'fp16'"),
    ("MACHINE.device=gpu", "'cuda'"),
    ("MACHINE.threads=0", "expected int >= 1"),
    ("MACHINE.deterministic=1", "expected bool"),
    ("RUN.resume=always", "'must'"),
    ("RUN.engine=training", "'train'"),
    ("RUN.seed=abc", "expected int >= 0"),
    ("CHECKPOINT.keep_last=0", "expected int >= 1"),
    ("CHECKPOINT.every_minutes=0", "expected float > 0"),
    ("CHECKPOINT.verify=none", "'off'"),
    ("CHECKPOINT.on_save_error=ignore", "'continue' or 'stop'"),
    ("OPTIMIZER.clip_norm=-1", "expected float > 0"),
    ("OPTIMIZER.on_nonfinite=raise", "'stop' or 'skip'"),
    ("MODEL.width=wide", "expected int"),
    ("MODEL.dropout=high", "expected float"),
    ("METERS.accuracy.topk=five", "expected int"),
    ("METERS=[accuracy]", "expected mapping"),
    ("DATA.TRAIN.transforms=[{pixels: 1}]", "transforms[0].name"),
    ("OPTIMIZER.SCHEDULES.lr.warmup=20 epochz", "epochs"),
    ("OPTIMIZER.SCHEDULES.lr.warmup=5", "5 epochs"),
    ("OPTIMIZER.SCHEDULES.lr.warmup=20 epochs", "20 epochs"),
    ("OPTIMIZER.momentum=lots", "expected float"),
    ("HOOKS.metrics.every_updates=often", "expected int"),
    ("MODEL.ema={decay: 2.0}", "decay"),
    ("LAUNCH.lead_seconds=7200", "LAUNCH.lead_seconds below 3600"),
    ("PHASES.test_every.updates=0", "expected int >= 1"),
    ("OPTIMIZER.sam={rho: -1}", "rho = -1 (command line): expected float > 0"),
)

SHAPES: Sequence[Row] = (
    ("LOSS.name=MSELoss", "LOSS: MSELoss does not fit the output (64, 10)"),
    ("LOSS.name=L1Loss", "LOSS: L1Loss"),
    ("MODEL.channels=3", "MODEL"),
    ("MODEL.classes=5", "5 classes"),
    ("MODEL.classes=9", "9 classes"),
    (("MODEL=resnet20", "MODEL.depth=21"), "20"),
    ("DATA.TRAIN.transforms=[{name: random_crop, size: 12}]", "transforms"),
    ("DATA.TRAIN.transforms=[{name: center_crop, size: 9}]", "transforms"),
    (("MODEL=mlp", "DATA.TEST.transforms=[{name: resize, size: 16}]"), "(256, 1, 16, 16)"),
    (("MODEL=mlp", "MODEL.input_shape=[1, 9, 9]"), "MODEL"),
    (
        (
            "MODEL=null",
            "MODEL.name=torch.nn.Linear",
            "MODEL.in_features=64",
            "MODEL.out_features=10",
        ),
        "MODEL",
    ),
    ("DATA.TRAIN.transforms=[{name: normalize, mean: [0.1, 0.2], std: [0.1, 0.2]}]", "transforms"),
    (("METERS.f1={name: f1, classes: 3}",), "METERS.f1"),
    ("METERS.top={name: accuracy, topk: 11}", "METERS.top"),
    (
        ("DATA.TRAIN.dataset=synthetic", "DATA.TRAIN.samples=200", "DATA.TRAIN.input_shape=[3]"),
        "the transforms do not fit",
    ),
    ("METERS.cells={name: confusion_matrix, classes: 4}", "METERS.cells"),
    (("MODEL=mlp", "DATA.TRAIN.transforms=[{name: flatten}]", "MODEL.input_shape=[32]"), "MODEL"),
    ("LOSS={name: cross_entropy, weight: [1.0, 2.0]}", "LOSS"),
)

FILES: Sequence[Row] = (
    ("MODEL.weights={here}/no_weights.pt", "no_weights.pt"),
    ("MODEL.weights={path: {here}/absent.safetensors}", "absent.safetensors"),
    (("DATA.TRAIN.dataset=image_folder", "DATA.TRAIN.path={here}/images"), "images"),
    (("DATA.TEST.dataset=image_folder", "DATA.TEST.path={here}/images"), "DATA.TRAIN"),
    ("RUN.imports=[my_missing_parts]", "my_missing_parts"),
    ("MODEL.name=my_package.models.Net", "my_package"),
    ("LOSS.name=phasetrain.losses.Nothing", "phasetrain.losses"),
    ("HOOKS.mine={name: my_hooks.Watch}", "my_hooks"),
    (
        ("DATA.TRAIN.dataset=idx", "DATA.TRAIN.images={here}/i", "DATA.TRAIN.labels={here}/l"),
        "{here}",
    ),
    (
        ("DATA.TRAIN.dataset=lines", "DATA.TRAIN.files={here}/*.csv", "DATA.TRAIN.form=csv"),
        "DATA.TRAIN",
    ),
    (("DATA.TRAIN.dataset=text", "DATA.TRAIN.files={here}/book.txt"), "book.txt"),
    (("DATA.TRAIN.dataset=webdataset", "DATA.TRAIN.files={here}/a.tar"), "a.tar"),
    ("RUN.resume=must", "no checkpoint"),
    (("RUN.engine=test", "RUN.checkpoint={here}/checkpoints/p0001"), "RUN.checkpoint"),
    ("PHASES.test_every.when=my_rules.due", "my_rules"),
    ("MODEL.weights={here}", "{here}"),
)

MONITORS: Sequence[Row] = (
    ("CHECKPOINT.best.monitor=test/acuracy", "test/accuracy"),
    ("CHECKPOINT.best.monitor=tst/accuracy", "test/accuracy"),
    ("CHECKPOINT.best.monitor=test/accurracy", "test/accuracy"),
    ("CHECKPOINT.best.monitor=test_accuracy", "test/accuracy"),
    ("CHECKPOINT.best.monitor=accuracy", "test/accuracy"),
    ("CHECKPOINT.best.monitor=test/loss", "-test/loss"),
    ("CHECKPOINT.best.monitor=-test/los", ("test/loss", "-test/loss")),
    ("CHECKPOINT.best.monitor=valid/accuracy", "DATA.TRAIN.subset"),
    ("HOOKS.early_stopping={monitor: test/acuracy}", "test/accuracy"),
    ("HOOKS.early_stopping={monitor: test/loss}", "-test/loss"),
    ("HOOKS.plateau={monitor: tset/accuracy}", "test/accuracy"),
    ("HOOKS.plateau={monitor: val/loss}", "DATA.TRAIN.subset"),
    ("HOOKS.early_stopping={monitor: test@ema/accuracy}", ("test/accuracy",)),
    (("MODEL.ema={}", "CHECKPOINT.best.monitor=test@emma/accuracy"), "test@ema/accuracy"),
    (("DATA.TEST=null", "CHECKPOINT.best.monitor=test/accuracy"), "train/accuracy"),
    (("METERS=null", "CHECKPOINT.load_best=true"), "the run has no meter"),
)

RULES: Sequence[Row] = (
    ("MODEL.freeze=[hed]", "head"),
    ("MODEL.freeze=[featurs.*]", "features"),
    ("MODEL.freeze=['[']", "wildcards"),
    ("MODEL.adapters={match: head, rank: 5000}", "lower rank"),
    ("LOSS.name=operator.mul", "`output, target`"),
    ("MODEL.freeze_updates=[{match: hed, for: 1}]", "head"),
    ("OPTIMIZER.groups=[{match: 'hed.*', lr_scale: 0.1}]", "head"),
    ("OPTIMIZER.groups=[{match: 'feature.0.*', lr_scale: 0.1}]", "features.0"),
    ("OPTIMIZER.groups=[{types: BatchNorm3d, weight_decay: 0.0}]", "BatchNorm2d"),
    ("OPTIMIZER.groups=[{types: [BatchNorm], weight_decay: 0.0}]", "BatchNorm2d"),
    ("OPTIMIZER.groups=[{lr_scale: 0.1}]", "match"),
    ("OPTIMIZER.groups=[{match: 'head.*', learning_rate: 0.1}]", "learning_rate"),
    ("OPTIMIZER.groups=[{match: 'head.*', weight_dacay: 0.1}]", "weight_decay"),
    ("OPTIMIZER.others={mine: {name: adamw, match: 'hed*'}}", "head"),
    ("MACHINE.activation_checkpointing=[Conv3d]", "Conv2d"),
    ("MACHINE.activation_checkpointing=[feature]", "features"),
    ("OPTIMIZER.SCHEDULES.momentun={name: linear}", "momentum"),
    ("RUN.allow=[PHASES.epoch]", "PHASES.epochs"),
    ("PHASES.stages=[{epochs: 1, MODEL: {freeze: [hed]}}]", "head"),
)

SUMS: Sequence[Row] = (
    ("OPTIMIZER.accumulate=5", "nearest that work: 4, 8"),
    ("OPTIMIZER.accumulate=3", "nearest that work: 2, 4"),
    ("DATA.TRAIN.micro_batch_size=48", "nearest that work: 32, 64"),
    ("DATA.TRAIN.micro_batch_size=10", "nearest that work: 8, 16"),
    (
        ("DATA.TRAIN.micro_batch_size=16", "OPTIMIZER.accumulate=2"),
        "is 32, not DATA.TRAIN.batch_size = 64",
    ),
    ("DATA.TRAIN.batch_size=2000", "to 1442 or less"),
    ("DATA.TEST.micro_batch_size=100", "nearest that work: 64, 128"),
    (("DISTRIBUTED.reduction=ordered", "DISTRIBUTED.virtual_shards=6"), "4 or 8"),
    (("DISTRIBUTED.reduction=ordered", "DATA.TRAIN.batch_size=60"), "nearest that work: 6, 10"),
    ("PHASES.updates=5", "keep one of them"),
    (("PHASES.updates=5", "PHASES.samples=100"), "keep one of them"),
    (("PHASES.epochs=null", "PHASES.stages=[{name: first}]"), "epochs, updates, samples"),
    (
        ("PHASES.epochs=null", "PHASES.stages=[{epochs: 1, updates: 3}]"),
        "give it one of epochs, updates, samples",
    ),
    (
        ("PHASES.epochs=null", "PHASES.stages=[{epochs: 1, MODEL: {width: 8}}]"),
        "the same for the whole run",
    ),
    ("DATA.TRAIN.subset.samples=5000", "1442"),
    (("DATA.TRAIN.subset.samples=20", "DATA.TRAIN.batch_size=64"), "to 20 or less"),
    ("MACHINE.threads=100000", "MACHINE.threads="),
    ("MODEL.swa={start: 100 epochs}", "MODEL.swa.start"),
)

GOODS = {  # of each key one choice, or none
    "model": (
        (), ("MODEL=mlp",), ("MODEL=resnet20",), ("MODEL.width=8", "MODEL.dropout=0.2"), ("MODEL.ema={}",),
        ("MODEL.freeze=['features.0']",), ("MODEL.swa={start: 0.5}",),
    ),
    "optimizer": (
        (), ("OPTIMIZER=adamw",), ("OPTIMIZER={name: RMSprop, lr: 0.01}",), ("OPTIMIZER={name: lars, lr: 0.1}",),
        ("OPTIMIZER.clip_norm=1.0",), ("OPTIMIZER.accumulate=4",), ("OPTIMIZER.sam={}",),
        ("OPTIMIZER.groups=[{max_ndim: 1, weight_decay: 0.0}]",),
    ),
    "schedule": (
        (), ("OPTIMIZER.SCHEDULES.lr.name=linear",), ("OPTIMIZER.SCHEDULES.lr={name: one_cycle}",),
        ("OPTIMIZER.SCHEDULES=null",), ("OPTIMIZER.SCHEDULES.lr.warmup=1 updates",),
    ),
    "data": (
        (), ("DATA.TRAIN.batch_size=48",), ("DATA.TRAIN.batch_transforms=[{name: mixup, alpha: 0.2}]",),
        ("DATA.TRAIN.workers=1",), ("DATA.TRAIN.sampler=stratified",), ("DATA.TRAIN.drop_last=false",),
        ("DATA.TRAIN.transforms=[{name: noise, std: 0.1}]",), ("DATA.TRAIN.subset.samples=200",),
    ),
    "phases": (
        ("PHASES.epochs=1",), ("PHASES.updates=5",), ("PHASES.samples=200",),
        ("PHASES.epochs=2", "PHASES.test_first=true"),
        ("PHASES.stages=[{epochs: 1}, {epochs: 1, OPTIMIZER: {lr: 0.01}}]",),
        ("PHASES.epochs=1", "DATA.TEST=null"),
    ),
    "watch": (
        (), ("CHECKPOINT.best.monitor=auto",), ("CHECKPOINT.best.monitor=train/accuracy",),
        ("HOOKS.early_stopping={monitor: -train/loss}",), ("METERS.top={name: accuracy, topk: 3}",),
        ("METERS.f1={}",), ("CHECKPOINT.every_updates=2",), ("CHECKPOINT.every_updates=1000",),
    ),
    "machine": ((), ("MACHINE.precision=bf16",), ("MACHINE.deterministic=false",), ("DISTRIBUTED.strategy=fsdp",)),
}  # fmt: skip


def broken(seed: int, count: int = BROKEN) -> list[Case]:
    """Return `count` broken configs, cycling through the kinds of mistakes."""
    random = Random(seed)
    makers: Mapping[str, Iterator[Case]] = {
        "key misspelled": _misspelled(random, "key misspelled", list(KEYS.items()), _key),
        "name misspelled": _misspelled(random, "name misspelled", _names(), _name),
        "key of other tools": _listed(random, "key of other tools", HABITS, meant=True),
        "value": _listed(random, "value", VALUES),
        "shape": _listed(random, "shape", SHAPES),
        "missing file": _listed(random, "missing file", FILES),
        "monitor": _listed(random, "monitor", MONITORS),
        "rule without effect": _listed(random, "rule without effect", RULES),
        "arithmetic": _listed(random, "arithmetic", SUMS),
    }
    found: list[Case] = []
    while len(found) < count:
        for maker in makers.values():
            found += [case for case in [next(maker, None)] if case is not None]
    return found[:count]


def good(seed: int, count: int = 1) -> list[Case]:
    """Return `count` valid configs with random choices."""
    random, found = Random(seed + 1), list[Case]()
    while len(found) < count:
        own = tuple(word for choices in GOODS.values() for word in random.choice(choices))
        if not _clash(own):
            base = tuple(
                word for word in BASE if not (word.startswith("MODEL.") and _other_model(own))
            )
            found.append(Case("good", (*base, *own), own))
    return found


def _clash(own: Sequence[str]) -> bool:
    """Return whether choices are incompatible for reasons other than the config checks."""
    text = " ".join(own)
    pairs = (
        ("accumulate=4", "batch_size=50"), ("features.0", "MODEL=mlp"), ("PHASES.stages", "PHASES.epochs"),
        ("one_cycle", "warmup"), ("SCHEDULES=null", "warmup"), ("subset", "stratified"), ("linear", "linear="),
        ("sam", "fsdp"), ("workers=1", "sam"), ("mixup", "METERS.f1"), ("DATA.TEST=null", "monitor=auto"),
    )  # fmt: skip
    return any(one in text and other in text for one, other in pairs)


def _other_model(own: Sequence[str]) -> bool:
    return any(word in ("MODEL=mlp", "MODEL=resnet20") for word in own)


def _listed(
    random: Random, kind: str, rows: Sequence[Row], *, meant: bool = False
) -> Iterator[Case]:
    for words, fixes in random.sample(list(rows), len(rows)):
        own = (words,) if isinstance(words, str) else words
        yield _case(kind, own, (fixes,) if isinstance(fixes, str) else fixes, meant=meant)


def _case(kind: str, own: tuple[str, ...], fixes: tuple[str, ...], *, meant: bool = False) -> Case:
    text = " ".join(own)
    lengths = ("PHASES.epochs", "PHASES.stages")
    other = "MODEL=" in text or "MODEL.name" in text
    base = tuple(word for word in BASE if not (word.startswith("MODEL.") and other))
    length = () if any(one in text for one in lengths) else (LENGTH,)
    return Case(kind, (*base, *length, *own), own, fixes, meant)


def _misspelled(
    random: Random,
    kind: str,
    rows: Sequence[tuple[str, str]],
    make: Callable[[Random, str, str], tuple[str, str]],
) -> Iterator[Case]:
    while True:
        for first, second in random.sample(list(rows), len(rows)):
            word, fix = make(random, first, second)
            yield _case(kind, (word,), (fix,), meant=True)


def _key(random: Random, path: str, value: str) -> tuple[str, str]:
    parent, _, name = path.rpartition(".")
    return f"{parent}.{slip(random, name)}={value}", path


def _names() -> list[tuple[str, str]]:
    return [(pattern, name) for pattern, names in NAMES.items() for name in names]


def _name(random: Random, pattern: str, name: str) -> tuple[str, str]:
    return pattern.format(slip(random, name)), name


def slip(random: Random, word: str) -> str:
    """Return a word with a typo: a letter dropped, doubled, replaced or swapped with the next."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    while True:
        at = random.randrange(1, len(word))
        changed = random.choice(
            (
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
                word[:at] + random.choice(letters) + word[at + 1 :],
                word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :],
            )
        )
        if changed != word and changed.strip("_") == changed and not changed[0].isdigit():
            return changed
