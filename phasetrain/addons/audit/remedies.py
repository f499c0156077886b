"""What to change in a script so that a part of its state survives a kill, by framework."""

FRAMEWORKS = {
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "transformers.trainer": "Hugging Face Trainer",
    "accelerate": "Accelerate",
    "ignite": "Ignite",
    "mmengine": "MMEngine",
    "torchtitan": "torchtitan",
    "phasetrain": "phasetrain",
}
"""Module of a framework -> its name."""

_SAMPLES = """\
sampler = RandomSampler(data, generator=generator)   # generator = torch.Generator()
generator.manual_seed(seed + epoch)                  # before each epoch
for i, batch in enumerate(loader): if i < batches_done: continue   # save epoch and batches_done"""

_SCHEDULE = """\
checkpoint["schedule"] = schedule.state_dict()
schedule.load_state_dict(checkpoint["schedule"])
                                                     # and step it once per update"""

_GENERATORS = """\
kind, keys, *rest = numpy.random.get_state()         # as a list, for weights_only=True
checkpoint["generators"] = (torch.get_rng_state(), (kind, keys.tolist(), *rest), random.getstate())
torch.set_rng_state(checkpoint["generators"][0])     # likewise torch.cuda.set_rng_state_all
numpy.random.set_state(checkpoint["generators"][1])
random.setstate(checkpoint["generators"][2])
DataLoader(..., generator=generator)                 # if they are restored already: without it,
                                                     # iter(loader) draws a seed from torch's"""

PLAIN = {
    "start": """\
if os.path.exists("last.pt"):
    checkpoint = torch.load("last.pt", weights_only=True)
    model.load_state_dict(checkpoint["model"])       # and every other part""",
    "samples": _SAMPLES,
    "content": """\
torch.manual_seed(hash((seed, index)) % 2**63)       # in __getitem__, per sample,
                                                     # or restore the generators
DataLoader(..., worker_init_fn=...)                  # seeds NumPy's generator in workers""",
    "generator": _GENERATORS,
    "weights": """\
torch.save({"model": model.state_dict(), "updates": updates}, "last.tmp")
os.replace("last.tmp", "last.pt")                    # after optimizer.step(), not before it
model.load_state_dict(torch.load("last.pt")["model"])""",
    "buffers": """\
checkpoint["model"] = model.state_dict()             # not only model.parameters()
self.register_buffer("mean", mean)                   # persistent: a buffer, not an attribute
model.load_state_dict(checkpoint["model"], strict=True)""",
    "optimizer": """\
checkpoint["optimizer"] = optimizer.state_dict()
optimizer.load_state_dict(checkpoint["optimizer"])
                                                     # once it has its parameter groups""",
    "option": _SCHEDULE,
    "schedule": _SCHEDULE,
    "scaler": """\
checkpoint["scaler"] = scaler.state_dict()
scaler.load_state_dict(checkpoint["scaler"])
                                                     # before the first step""",
    "length": """\
checkpoint["updates"] = updates
updates = checkpoint["updates"]                      # and the epoch that follows from it
while updates < total: ...                           # not: for epoch in range(epochs)""",
    "loss": """\
checkpoint["rest"] = {"updates": updates, ...}       # numbers and modules that the loss depends on:
                                                     # counters, targets, teachers, queues,
                                                     # averages; restore each of them""",
    "checkpoint": """\
checkpoint["ema"] = ema.state_dict()                 # whatever the named key holds
ema.load_state_dict(checkpoint["ema"])
                                                     # and update it once per optimizer step""",
    "seed": """\
generator = torch.Generator()
DataLoader(..., generator=generator)                 # iter(loader) draws its seed from this one""",
    "file": """\
checkpoint["best"] = best
best = checkpoint["best"]                            # before the first test""",
}
"""Kind of a difference -> lines for a custom training loop."""

RANKS = {
    "samples": """\
sampler.set_epoch(epoch)                             # a DistributedSampler, before each epoch,
                                                     # with the epoch of the checkpoint
for i, batch in enumerate(loader): if i < batches_done: continue   # save epoch and batches_done""",
    "generator": """\
states = [None] * world_size
dist.all_gather_object(states, torch.get_rng_state())   # in every rank; then save `states`
torch.set_rng_state(states[rank])                    # likewise NumPy, random and CUDA""",
}
"""Kind of a difference -> lines for a custom training loop of several ranks."""

BY_FRAMEWORK = {
    "Lightning": {
        "start": """\
Trainer(callbacks=[ModelCheckpoint(save_last=True, every_n_train_steps=100)])
trainer.fit(model, datamodule=data, ckpt_path="last")""",
        "samples": """\
from torchdata.stateful_dataloader import StatefulDataLoader
def train_dataloader(self): return StatefulDataLoader(data, shuffle=True, ...)
trainer.fit(model, ckpt_path="last")                 # a plain DataLoader starts its epoch again""",
        "generator": """\
def on_save_checkpoint(self, checkpoint): checkpoint["rng"] = torch.get_rng_state()
def on_load_checkpoint(self, checkpoint): self.rng = checkpoint["rng"]
def on_train_start(self): torch.set_rng_state(self.rng)   # Lightning restores no generator""",
    },
    "Hugging Face Trainer": {
        "start": "trainer.train(resume_from_checkpoint=True)",
        "samples": """\
TrainingArguments(..., ignore_data_skip=False)       # skips the batches that were trained
TrainingArguments(..., data_seed=0, seed=0)
trainer.train(resume_from_checkpoint=True)""",
    },
    "Accelerate": {
        "start": "accelerator.load_state(folder)            # after accelerator.prepare",
        "samples": """\
DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
loader = accelerator.skip_first_batches(loader, batches_done)   # without a stateful loader,
                                                     # in the first epoch after a resume""",
        "scaler": "accelerator.save_state(folder)            # saves the scaler as well",
    },
    "MMEngine": {
        "start": "Runner(..., resume=True)                             # or cfg.resume = True",
        "samples": """\
train_cfg=dict(type="IterBasedTrainLoop", max_iters=10000)
train_dataloader=dict(sampler=dict(type="InfiniteSampler", seed=0), ...)
                                                     # by epochs, it starts its epoch again""",
    },
    "Ignite": {
        "start": "Checkpoint.load_objects(to_load=to_save, checkpoint=torch.load(path))",
        "samples": """\
from ignite.engine.deterministic import DeterministicEngine
trainer = DeterministicEngine(update)                # restores the order in the middle of an epoch
to_save = {"trainer": trainer, "model": model, "optimizer": optimizer}""",
    },
}
"""Name of a framework -> kind of a difference -> lines for it."""


def find_remedy(kind: str, framework: str, world: int = 1) -> str:
    """Return lines of code that usually fix a kind of difference, in a process group of a size."""
    own = BY_FRAMEWORK.get(FRAMEWORKS.get(framework, ""), {})
    plain = {**PLAIN, **RANKS} if world > 1 else PLAIN
    return own.get(kind, plain.get(kind, ""))
