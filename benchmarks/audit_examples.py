"""Examples that frameworks ship, audited with local data: the outputs in `docs/addons/audit.md`.

    python benchmarks/audit_examples.py FOLDER [--only TEXT]

FOLDER has the files of `EXAMPLES` from the repositories of the frameworks, with their names there.
Only the lines of `changes` are changed, so that nothing is downloaded and a run takes seconds.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from audit_frameworks import TORCHVISION
from audit_scripts import change

from phasetrain.addons.audit.auditor import audit
from phasetrain.addons.audit.text import format_audit


@dataclass(frozen=True)
class Example:
    """A script of a framework.

    Attributes:
        name: file in the folder, which gets the name `train.py`.
        source: where it comes from.
        words: words of the command behind `train.py`.
        resume: further words of the command that resumes.
        changes: replacements of text.
    """

    name: str
    source: str
    words: str
    resume: str
    changes: Sequence[tuple[str, str]]


IMAGENET = (
    ("FakeData(1281167, (3, 224, 224), 1000,", "FakeData(32, (3, 32, 32), 1000,"),
    ("FakeData(50000, (3, 224, 224), 1000,", "FakeData(8, (3, 32, 32), 1000,"),
)

SEQUENCES = """\
class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(100, (16,), generator=generator)
        return {"input_ids": ids, "labels": ids[0] % 2}


class Counts:
    def add_batch(self, predictions, references):
        self.right = (predictions == references).sum().item()

    def compute(self):
        return {"right": self.right}


def get_dataloaders(accelerator, batch_size=16):
    def collate_fn(examples):
        return BatchEncoding(torch.utils.data.default_collate(examples))

    loaders = [
        DataLoader(Sequences(), shuffle=shuffle, collate_fn=collate_fn, batch_size=batch_size)
        for shuffle in (True, False)
    ]
    return loaders


def make_model():
    sizes = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 32}
    return BertForSequenceClassification(
        BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    )


"""

ACCELERATE = (
    ("import evaluate\n", ""),
    ("from datasets import load_dataset\n", ""),
    (
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer,",
        "from transformers import BatchEncoding, BertConfig, BertForSequenceClassification,",
    ),
    ("def training_function(", SEQUENCES + "def training_function("),
    ('evaluate.load("glue", "mrpc")', "Counts()"),
    (
        'AutoModelForSequenceClassification.from_pretrained("bert-base-cased", return_dict=True)',
        "make_model()",
    ),
)

IGNITE = (
    ("from torchvision.datasets import MNIST\n", ""),
    (
        'MNIST(download=True, root=".", transform=data_transform, train=True)',
        "torch.utils.data.TensorDataset(torch.randn(64, 1, 28, 28), torch.arange(64) % 10)",
    ),
    (
        'MNIST(download=False, root=".", transform=data_transform, train=False)',
        "torch.utils.data.TensorDataset(torch.randn(64, 1, 28, 28), torch.arange(64) % 10)",
    ),
    ("num_workers=4", "num_workers=0"),
)

WORDS = """\
class Words(torch.utils.data.Dataset):
    vocab_size = 50

    def __len__(self):
        return 96

    def __getitem__(self, index):
        words = torch.randint(50, (9,), generator=torch.Generator().manual_seed(index))
        return words[:-1], words[1:]


"""

LIGHTNING = (
    ("import Transformer, WikiText2\n", "import Transformer\n"),
    ("def main():\n", WORDS + "def main():\n"),
    ("WikiText2()", "Words()"),
    ("[n - 4000, 2000, 2000]", "[n - 32, 16, 16]"),
    ("batch_size=20, shuffle=True", "batch_size=8, shuffle=True"),
    (
        "L.Trainer(gradient_clip_val=0.25, max_epochs=20)",
        "L.Trainer(gradient_clip_val=0.25, max_epochs=4, accelerator='cpu', logger=False, "
        "enable_progress_bar=False, callbacks=[L.pytorch.callbacks.ModelCheckpoint("
        "dirpath='saved', save_last=True, every_n_train_steps=5)])",
    ),
    (
        "trainer.fit(model, train_dataloader, val_dataloader)",
        "trainer.fit(model, train_dataloader, val_dataloader, ckpt_path='last')",
    ),
    ("    trainer.test(model, test_dataloader)\n", ""),
)

IMAGES = """\
class Images(torchvision.datasets.FakeData):
    def __init__(self, root, train, download, transform):
        super().__init__(64, (3, 32, 32), 10, transform)


load = torch.load
torch.load = lambda *args, **kwargs: load(*args, **{**kwargs, "weights_only": False})


def main():
    torch.manual_seed(0)
"""

MMENGINE = (
    ("def main():\n", IMAGES),
    ("torchvision.datasets.CIFAR10(", "Images("),
    ("torchvision.models.resnet50()", "torchvision.models.shufflenet_v2_x0_5()"),
    ("batch_size=32,", "batch_size=8,"),
    ("max_epochs=2,", "max_epochs=4,"),
    (
        "        launcher=args.launcher,\n",
        "        launcher=args.launcher,\n        resume=True,\n"
        "        randomness=dict(seed=0),\n"
        "        default_hooks=dict(checkpoint=dict("
        "type='CheckpointHook', interval=5, by_epoch=False)),\n",
    ),
)

EXAMPLES = (
    Example(
        "main.py",
        "imagenet/main.py of pytorch/examples, 77f55b9",
        "--dummy -a shufflenet_v2_x0_5 -b 4 -j 0 --epochs 4 --seed 0",
        "--resume checkpoint.pth.tar",
        IMAGENET,
    ),
    Example(
        "checkpointing.py",
        "examples/by_feature/checkpointing.py of Accelerate, 16cb6eb",
        "--cpu --checkpointing_steps 5 --output_dir states",
        "--resume_from_checkpoint {ckpt_dir}",
        ACCELERATE,
    ),
    Example(
        "mnist_save_resume_engine.py",
        "examples/mnist/mnist_save_resume_engine.py of Ignite, de08e79",
        "--log_dir run --batch_size 8 --epochs 3 --checkpoint_every 1 --deterministic",
        "--resume_from {ckpt}",
        IGNITE,
    ),
    Example(
        "transformer.py",
        "examples/pytorch/basics/transformer.py of Lightning, 7f0c343",
        "",
        "",
        LIGHTNING,
    ),
    Example(
        "distributed_training.py",
        "examples/distributed_training.py of MMEngine, 2543429",
        "",
        "",
        MMENGINE,
    ),
)


def audit_example(example: Example, text: str) -> str:
    """Return what the audit of an example says."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TORCHVISION + change(text, *example.changes))
        previous = Path.cwd()
        os.chdir(folder)
        try:
            command = [sys.executable, "train.py", *example.words.split()]
            resume = [*command, *example.resume.split()] if example.resume else None
            verdict = audit(command, resume=resume, updates=20, quick=True)
        finally:
            os.chdir(previous)
    return format_audit(verdict)


def main() -> None:
    """Audit the examples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="examples whose names have this text")
    flags = parser.parse_args()
    for example in EXAMPLES:
        if flags.only in example.name:
            text = flags.folder.joinpath(example.name).read_text()
            print(f"{example.source}:\n{audit_example(example, text)}\n", flush=True)


if __name__ == "__main__":
    main()
