"""The training in problem.py with MMEngine; `--way iterations` uses its iteration-based loop."""

from typing import Any

from mmengine.model import BaseModel
from mmengine.runner import Runner
from problem import BATCH, EPOCHS, LR, SAVE_EVERY, SEED, UPDATES, WEIGHT_DECAY, Net, Samples, wanted
from torch.nn.functional import cross_entropy


class Model(BaseModel):
    def __init__(self, random: bool) -> None:
        super().__init__()
        self.net = Net(random)

    def forward(self, inputs, targets, mode="tensor"):
        outputs = self.net(inputs)
        return {"loss": cross_entropy(outputs, targets)} if mode == "loss" else outputs


def loop(way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configs of the loop and its sampler."""
    if way == "iterations":
        return {"by_epoch": False, "max_iters": UPDATES}, {
            "type": "InfiniteSampler",
            "shuffle": True,
        }
    return {"by_epoch": True, "max_epochs": EPOCHS}, {"type": "DefaultSampler", "shuffle": True}


def main() -> None:
    asked = wanted()
    train_cfg, sampler = loop(asked.way)
    Runner(
        model=Model(asked.random),
        work_dir=str(asked.folder),
        train_dataloader={
            "dataset": Samples(asked.random),
            "sampler": sampler,
            "batch_size": BATCH,
            "num_workers": asked.workers,
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg=train_cfg,
        optim_wrapper={"optimizer": {"type": "AdamW", "lr": LR, "weight_decay": WEIGHT_DECAY}},
        param_scheduler={"type": "CosineAnnealingLR", "T_max": UPDATES, "by_epoch": False},
        default_hooks={
            "checkpoint": {"type": "CheckpointHook", "interval": SAVE_EVERY, "by_epoch": False}
        },
        randomness={"seed": SEED, "deterministic": True},
        resume=asked.resume,
    ).train()


if __name__ == "__main__":
    main()
