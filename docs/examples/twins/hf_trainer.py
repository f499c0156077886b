"""The Trainer of Hugging Face, which saves after every five updates."""

from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments, set_seed

set_seed(0)
inputs = torch.randn(64, 8)
data = Dataset.from_dict({"inputs": inputs, "labels": inputs[:, :1]}).with_format("torch")


class Net(nn.Module):
    """A regression that returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, inputs, labels=None):
        """Return the loss and the output."""
        output = self.net(inputs)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


model = Net()


class InOrder(Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


arguments = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=8,
    num_train_epochs=5,
    save_steps=5,
    use_cpu=True,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    report_to=[],
    disable_tqdm=True,
)
trainer = InOrder(model, arguments, train_dataset=data)
saved = any(Path("checkpoints").glob("checkpoint-*"))
trainer.train(resume_from_checkpoint=saved)
