"""The wording of the messages that users meet most often, one after the other, as in a catalogue.

All other tests expect codes, keys and values. After a message was reworded on purpose,
`python tests/test_messages.py` writes the present wording into this file; the diff shows it.
"""

import io
import os
import re
import shlex
import shutil
import sysconfig
import tempfile
from pathlib import Path

import pytest

from phasetrain.app.api import run
from phasetrain.errors import PhasetrainError
from phasetrain.runtime.terminal import Terminal

STOPPED = Path(__file__).parent / "data" / "releases" / "0.1" / "stopped"
_LISTED = re.compile(r"(Known|It takes|options of experiment): (?:[^;.(]|\.(?=\w))*")

MESSAGES = r"""
$ OPTIMIZER.lrr=1
OPTIMIZER.lrr = 1 (command line): 'sgd' has no such parameter; did you mean OPTIMIZER.lr? It takes: ...

$ MODLE.width=3
MODLE.width = 3 (command line): no such key; did you mean MODEL.width? Known sections: RUN, DATA, TASK, MODEL, LOSS, METERS, OPTIMIZER, PHASES, CHECKPOINT, MACHINE, DISTRIBUTED, LAUNCH, HOOKS, EXTRACT, FIND

$ lr=0.1
lr = 0.1 (command line): no such key; did you mean OPTIMIZER.lr? Known sections: RUN, DATA, TASK, MODEL, LOSS, METERS, OPTIMIZER, PHASES, CHECKPOINT, MACHINE, DISTRIBUTED, LAUNCH, HOOKS, EXTRACT, FIND

$ DATA.TRAIN.batchsize=3
DATA.TRAIN.batchsize = 3 (command line): 'digits' has no such parameter; did you mean DATA.TRAIN.batch_size? It takes: ...

$ OPTIMIZER.lr=abc
OPTIMIZER.lr = 'abc' (command line): expected float >= 0

$ OPTIMIZER.lr=-1
OPTIMIZER.lr = -1 (command line): expected float >= 0

$ PHASES.epochs=1.5
PHASES.epochs = 1.5 (command line): expected int >= 0 and <= 1000000 or null

$ DATA.TRAIN.workers=-1
DATA.TRAIN.workers = -1 (command line): expected int >= 0 and <= 1024 or 'auto'

$ RUN.resume=always
RUN.resume = 'always' (command line): expected 'auto' or 'must' or 'never' or 'restart'

$ MACHINE.precision=fp61
MACHINE.precision = 'fp61' (command line): expected 'fp32' or 'tf32' or 'bf16' or 'fp16' or 'apex'; did you mean 'fp16'?

$ MACHINE.device=gpu
MACHINE.device = 'gpu' (command line): expected 'auto' or 'cpu' or 'cuda'; did you mean 'cuda'?

$ CHECKPOINT.keep_last=0
CHECKPOINT.keep_last = 0 (command line): expected int >= 1

$ LOSS=null
LOSS = null (command line): expected mapping of keys: name; leave LOSS out for its defaults, or set a key, as in LOSS.name=...

$ LOSS.name=focl
LOSS.name = 'focl' (command line): no loss has this name. Known: ...; a dotted path works too.

$ MODEL.name=resnet_cifra
MODEL.name = 'resnet_cifra' (command line): no model has this name; did you mean 'resnet_cifar'? Known: ...; a dotted path works too, and so does a name after timm. or torchvision. or transformers.

$ DATA.TRAIN.dataset=digit
DATA.TRAIN.dataset = 'digit' (command line): no dataset has this name; did you mean 'digits'? Known: ...; a dotted path works too, and so does a name after torchvision.

$ 'DATA.TRAIN.dataset={name: image_folder, path: x}'
DATA.TRAIN.dataset = {'name': 'image_folder', 'path': 'x'} (command line): expected str or null; the parameters of a dataset are next to its name: DATA.TRAIN.dataset=image_folder DATA.TRAIN.path=...

$ 'METERS.acuracy={}'
METERS.acuracy = 'acuracy' (command line): no meter has this name; did you mean 'accuracy'? Known: ...; a dotted path works too, and so does a name after torchmetrics.

$ 'HOOKS.consol={}'
HOOKS.consol = 'consol' (command line): no hook has this name; did you mean 'console'? Known: ...; a dotted path works too.

$ OPTIMIZER.name=sdg
OPTIMIZER.name = 'sdg' (command line): no optimizer has this name; did you mean 'sgd'? Known: ...; a dotted path works too, and so does a name after bitsandbytes. or pytorch_optimizer. or schedulefree. or timm.

$ DATA.TRAIN.sampler=shufled
DATA.TRAIN.sampler = 'shufled' (command line): no sampler has this name; did you mean 'shuffled'? Known: ...; a dotted path works too.

$ OPTIMIZER.SCHEDULES.lr=cosin
OPTIMIZER.SCHEDULES.lr.name = 'cosin' (command line): no schedule has this name; did you mean 'cosine'? Known: ...; a dotted path works too, and so does a name after timm. or torch.

$ 'DATA.TRAIN.transforms=[random_shft]'
DATA.TRAIN.transforms[0] = 'random_shft' (command line): no transform has this name; did you mean 'random_shift'? Known: ...; a dotted path works too, and so does a name after albumentations. or torchvision.

$ 'DATA.TRAIN.transforms=[{name: random_shift, pixles: 1}]'
DATA.TRAIN.transforms[0].pixles = 1 (command line): 'random_shift' has no such parameter; did you mean DATA.TRAIN.transforms[0].pixels? It takes: ...

$ MODEL.name=no_such_module.Net
MODEL.name = 'no_such_module.Net' (command line): module 'no_such_module' cannot be imported (ModuleNotFoundError: No module named 'no_such_module')

$ LOSS.name=collections.Nothing
LOSS.name = 'collections.Nothing' (command line): module 'collections' (STDLIB/collections/__init__.py) has no callable 'Nothing'

$ experiment=digts
experiment=digts: there is no file experiment/digts.yaml; did you mean 'digits'? options of experiment: ...; yours go into folder `experiment` of --config-dir DIR (default: ./configs or ./conf); or give a file: phasetrain path/to/digts.yaml

$ MODEL=reznet20
MODEL=reznet20: there is no file MODEL/reznet20.yaml; did you mean 'resnet20'? options of MODEL: mlp, resnet20, resnet32, resnet56, small_cnn, small_cnn_grid7; a part is chosen by name with MODEL.name=reznet20

$ OPTIMIZER.lr=0.1,0.2
OPTIMIZER.lr=0.1,0.2 gives several values; add -m to train with each of them, write [a,b] for a list, or quote the value for a text with a comma

$ OPTIMIZER.lr
'OPTIMIZER.lr' is not an override; expected FILE.yaml, SECTION.key=value, SECTION=GROUP or ~SECTION.key

$ PHASES.epochs=null
PHASES: one of epochs, updates, samples must be set, as in PHASES.epochs=10

$ DATA.TRAIN.micro_batch_size=5
DATA.TRAIN.micro_batch_size = 5 (command line) does not divide DATA.TRAIN.batch_size = 64 (64 = 12 x 5 + 4); nearest that work: 4, 8

$ OPTIMIZER.accumulate=7
OPTIMIZER.accumulate = 7 (command line) does not divide DATA.TRAIN.batch_size = 64 (64 = 9 x 7 + 1); nearest that work: 4, 8

$ DATA.TRAIN.batch_size=100000
DATA.TRAIN.batch_size = 100000 is larger than the 1442 samples of the split, and DATA.TRAIN.drop_last = true drops the only batch; set DATA.TRAIN.batch_size to 1442 or less, or DATA.TRAIN.drop_last=false

$ DATA.TEST=null CHECKPOINT.best.monitor=test/accuracy
CHECKPOINT.best.monitor = 'test/accuracy': no phase of this run measures it (what a hook or phasetrain.log adds needs a meter, such as METERS.x={name: logged, of: x, better: larger}). Known: ...; add a minus sign if smaller is better

$ CHECKPOINT.best.monitor=test/acuracy
CHECKPOINT.best.monitor = 'test/acuracy': no phase of this run measures it; did you mean 'test/accuracy'? Known: ...; add a minus sign if smaller is better

$ HOOKS.early_stopping.monitor=test/acuracy
HOOKS.early_stopping.monitor = 'test/acuracy': no phase of this run measures it; did you mean 'test/accuracy'? Known: ...; add a minus sign if smaller is better

$ "OPTIMIZER.groups=[{match: 'haed.*', lr: 0.1}]"
OPTIMIZER.groups[0].match = 'haed.*' matches none of the 11 trained weights; did you mean 'head'?

$ "MODEL.freeze=['haed.*']"
MODEL.freeze = [haed.*]: it matches no module with parameters and no parameter; did you mean 'head'? Names begin with one of features, head; a pattern is a whole name, in which `*`, `?` and `[...]` are wildcards

$ "MODEL.freeze=['[']"
MODEL.freeze = [[]: it matches no module with parameters and no parameter. Names begin with one of features, head; a pattern is a whole name, in which `*`, `?` and `[...]` are wildcards

$ "MODEL.adapters={match: head, rank: 5000}"
MODEL.adapters (adapter 'lora'): rank = 5000: the weight of head is a matrix of 10 x 64, whose rank is 10 at most; lower rank, or leave the layer out of match

$ DATA.TRAIN.workers=100000
DATA.TRAIN.workers = 100000 (command line): expected int >= 0 and <= 1024 or 'auto'

$ DATA.TRAIN.exclude=[a]
DATA.TRAIN.exclude = 'a': it is neither the id of a sample nor a file that can be read as ids of samples: No such file or directory; expected integers, or the path of an .npy array of integers, or of a text file with a number per line

$ DATA.TRAIN.name=digits
DATA.TRAIN.name = 'digits' (command line): 'digits' has no such parameter; did you mean DATA.TRAIN.dataset? It takes: ...

$ DATA.TRAIN.dataset=mixed "DATA.TRAIN.datasets={clean: {dataset: digits, weight: -1}}"
DATA.TRAIN.datasets.clean.weight = -1 (command line): 'digits' has no such parameter. It takes: ...

$ PHASES.epochs=100000000000000000000000
PHASES.epochs = 100000000000000000000000 (command line): expected int >= 0 and <= 1000000 or null

$ LOSS.name=operator.mul
LOSS.name = 'operator.mul': its parameters a and b have no value; if it computes the loss, rename them to `output, target`, and if it returns a loss, set LOSS.a and LOSS.b

$ MODEL.weights.path=missing.safetensors
MODEL.weights.path = 'missing.safetensors': there is no such file or folder; check the path

$ MODEL=resnet20 MODEL.depth=21
MODEL.depth = 21 (command line): expected 20 or 32 or 56

$ 'RUN.imports=[no_such_module]'
RUN.imports: there is no module 'no_such_module', neither installed nor in FOLDER

$ RUN.engine=train RUN.dir=/proc/phasetrain
RUN.dir = '/proc/phasetrain' cannot be written: No such file or directory (errno 2); set RUN.dir to a folder on a disk, such as runs/mine, that this user may write to

$ RUN.engine=train OPTIMIZER.lr=1e30 MODEL=mlp MODEL.hidden=[4] PHASES.limit.train=4
OPTIMIZER.on_nonfinite = 'stop': update 3 is not finite (loss nan; gradients of layers.1.weight, layers.1.bias, layers.3.weight, layers.3.bias; samples 1348, 1086, 49, 733, 1231 and 59 more); the weights are those before the update; the step is saved in FOLDER/run/numerics/u00000003; inspect it with RUN.engine=replay RUN.step=3. Lower OPTIMIZER.lr or set OPTIMIZER.clip_norm; to skip such updates, set OPTIMIZER.on_nonfinite=skip and RUN.allow=OPTIMIZER.on_nonfinite

$ RUN.engine=train RUN.resume=must
RUN.resume = 'must' and RUN.dir = 'FOLDER/run' contains no checkpoint to resume from; set RUN.resume=auto to start a run in it

$ RUN.engine=trian
RUN.engine = 'trian' (command line): expected 'train' or 'test' or 'plan' or 'extract' or 'replay' or 'find_lr' or 'find_batch_size'; did you mean 'train'?

$ OPTIMIZER.lrr=1 LOSS.name=focl PHASES.epochs=x
3 problems in the config:
  1. LOSS.name = 'focl' (command line): no loss has this name. Known: ...; a dotted path works too.
  2. PHASES.epochs = 'x' (command line): expected int >= 0 and <= 1000000 or null
  3. OPTIMIZER.lrr = 1 (command line): 'sgd' has no such parameter; did you mean OPTIMIZER.lr? It takes: ...

$ stopped: RUN.seed=1
'FOLDER/run' contains a run with another config; resuming would not give the same run:
  RUN.seed: the checkpoint has 0, now 1 (forbidden)
Restore the old values, allow the changes, set RUN.dir to another folder, or start over with --restart

$ stopped: OPTIMIZER.lr=0.1
'FOLDER/run' contains a run with another config; resuming would not give the same run:
  OPTIMIZER.lr: the checkpoint has 0.05, now 0.1 (adjustable: allow it with RUN.allow=OPTIMIZER.lr)
Restore the old values, allow the changes, set RUN.dir to another folder, or start over with --restart

$ stopped: RUN.resume=never
RUN.resume = 'never' and RUN.dir = 'FOLDER/run' contains a run; set RUN.resume=auto to resume it, or RUN.dir to another folder

$ stopped: DATA.TRAIN.batch_size=64 RUN.allow=[OPTIMIZER.lr]
'FOLDER/run' contains a run with another config; resuming would not give the same run:
  DATA.TRAIN.batch_size: the checkpoint has 32, now 64 (adjustable: allow it with RUN.allow=DATA.TRAIN.batch_size)
Restore the old values, allow the changes, set RUN.dir to another folder, or start over with --restart
"""


def read_messages() -> dict[str, str]:
    """Return command line -> message."""
    blocks = [
        block.partition("\n") for block in MESSAGES.strip().removeprefix("$ ").split("\n\n$ ")
    ]
    return {command: message for command, _, message in blocks}


def message_of(command: str, folder: Path) -> str:
    """Return the message with which a command ends, without lists that depend on what is installed.

    Args:
        command: overrides; after `stopped:`, of a run folder that holds a stopped run.
        folder: an empty one, which is the current folder of the command.
    """
    if command.startswith("stopped: "):
        command = command.removeprefix("stopped: ")
        shutil.copytree(STOPPED, folder / "run")
        given = (STOPPED / "overrides.yaml").read_text("utf-8").splitlines()
        settings = [line.removeprefix("- ").strip("'") for line in given]
    else:
        settings = ["RUN.engine=plan", "RUN.rehearse=false"]
    words = [*settings, f"RUN.dir={folder / 'run'}", *shlex.split(command)]
    before = Path.cwd()
    os.chdir(folder)
    try:
        run(words, terminal=Terminal(io.StringIO(), live=False))
    except PhasetrainError as error:
        text = str(error).replace(str(folder), "FOLDER")
        text = text.replace(sysconfig.get_path("stdlib"), "STDLIB")
    else:
        raise AssertionError(f"{command} is accepted")
    finally:
        os.chdir(before)
    return _LISTED.sub(r"\1: ...", text)


@pytest.mark.addon
@pytest.mark.parametrize("command", read_messages())
def test_message_has_its_wording(command: str, tmp_path: Path) -> None:
    assert message_of(command, tmp_path) == read_messages()[command]


def test_catalogue_has_about_forty_messages() -> None:
    assert 35 <= len(read_messages()) <= 60


def write_messages() -> None:
    """Write the present wording of all messages into this file."""
    blocks = []
    for command in read_messages():
        with tempfile.TemporaryDirectory() as folder:
            blocks.append(f"$ {command}\n{message_of(command, Path(folder))}")
    page = Path(__file__)
    head, _, rest = page.read_text("utf-8").partition('MESSAGES = r"""\n')
    tail = rest.partition('\n"""\n')[2]
    catalogue = "\n\n".join(blocks)
    page.write_text(f'{head}MESSAGES = r"""\n{catalogue}\n"""\n{tail}', encoding="utf-8")


if __name__ == "__main__":
    write_messages()
