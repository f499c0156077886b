"""The training in problem.py with the Hugging Face Trainer."""

from problem import BATCH, EPOCHS, LR, SAVE_EVERY, SEED, WEIGHT_DECAY, Net, Samples, wanted
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Rows(Dataset):
    """Samples as mappings, as the Trainer expects."""

    def __init__(self, random: bool) -> None:
        self.samples = Samples(random)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        inputs, target = self.samples[index]
        return {"inputs": inputs, "labels": target}


class Model(nn.Module):
    def __init__(self, random: bool) -> None:
        super().__init__()
        self.net = Net(random)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    asked = wanted()
    arguments = TrainingArguments(
        output_dir=str(asked.folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
        full_determinism=True,
        use_cpu=True,
        dataloader_num_workers=asked.workers,
    )
    trainer = Trainer(Model(asked.random), arguments, train_dataset=Rows(asked.random))
    trainer.train(resume_from_checkpoint=asked.resume)


if __name__ == "__main__":
    main()
