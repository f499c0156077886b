"""The training in problem.py with Lightning; `--way stateful` uses StatefulDataLoader."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from problem import (
    BATCH,
    EPOCHS,
    LR,
    SAVE_EVERY,
    SEED,
    UPDATES,
    WEIGHT_DECAY,
    Net,
    Samples,
    Wanted,
    wanted,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, random: bool) -> None:
        super().__init__()
        self.net = Net(random)

    def training_step(self, batch, index):
        inputs, targets = batch
        return cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=UPDATES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(asked: Wanted) -> DataLoader:
    if asked.way == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader  # only this way needs it

        return StatefulDataLoader(
            Samples(asked.random), BATCH, shuffle=True, num_workers=asked.workers
        )
    return DataLoader(Samples(asked.random), BATCH, shuffle=True, num_workers=asked.workers)


def main() -> None:
    asked = wanted()
    lightning.seed_everything(SEED, workers=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        deterministic=True,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=asked.folder,
        callbacks=[
            ModelCheckpoint(
                asked.folder, every_n_train_steps=SAVE_EVERY, save_top_k=-1, save_last=True
            )
        ],
    )
    trainer.fit(Module(asked.random), loader(asked), ckpt_path="last" if asked.resume else None)


if __name__ == "__main__":
    main()
