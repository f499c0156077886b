"""Recipes of the docs, found by words of the question."""

import re
from collections.abc import Mapping
from types import MappingProxyType

RECIPES: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "docs/cookbook/data.md": (
            ("Train on arrays in memory", "numpy tensor fit TensorDataset"),
            ("Train on files in S3 or on a web server", "remote url bucket"),
            ("Read a CSV file", "pandas table dataframe dataset custom"),
            ("Read a folder of arrays", "npy numpy files dataset custom"),
            ("Read a folder of images", "jpg png ImageFolder dataset"),
            ("Hold out a validation set", "split"),
            ("Cross-validate", "cross validation folds kfold"),
            (
                "Test on several datasets",
                "multiple test sets splits validation different metrics evaluate",
            ),
            ("Draw rare classes more often", "imbalanced oversample weighted sampler"),
            ("Weight classes in the loss", "class weights imbalanced"),
            ("Train with several labels per sample", "multilabel multi label"),
            ("Train a regression", "mse"),
            (
                "Train on a table with categories",
                "tabular embedding categorical standardize targets csv",
            ),
            ("Segment images", ""),
            (
                "Image to image: super-resolution, denoising",
                "image target upscale denoise restoration flip input and target together",
            ),
            ("Augment with my own function", "custom augmentation transform random"),
            ("Use mixup or CutMix", ""),
            ("Batch sequences of different lengths", "variable length padding pad custom collate"),
            ("Train on one graph", "gnn gcn nodes masks full batch transductive"),
            (
                "Classify graphs",
                "graph classification gnn variable size block diagonal batch custom collate",
            ),
            (
                "Use groups as samples",
                "learning to rank ranking queries documents bags sets multiple instance ndcg",
            ),
            (
                "Rank against the whole corpus",
                "retrieval recommendation recall@k mrr two tower logq in batch negatives",
            ),
            ("Tag tokens", ""),
            ("Find key points", ""),
            ("Train on a stream without a length", "iterable IterableDataset streaming"),
            (
                "Mix datasets in proportions",
                "several multiple datasets ratios mixture concat concatenate combine",
            ),
            (
                "Train with few labels",
                "semi supervised semi-supervised fixmatch mean teacher ema consistency",
            ),
            (
                "Choose samples by the model",
                "active learning uncertainty sampling pool hard examples chosen by the model",
            ),
            ("Choose samples by the model, in a script", "active learning fit rounds pool"),
            ("Train on part of the data", "subset fraction"),
            ("Survive unreadable samples", "corrupt bad"),
            ("Find out whether loading is the bottleneck", "slow dataloader workers"),
        ),
        "docs/cookbook/runs.md": (
            ("Train longer", "more epochs continue extend"),
            ("Resume with another learning rate", "change hyperparameters continue manual"),
            (
                "Start a new run from the weights of another one",
                "pretrained initialize warm checkpoint load",
            ),
            ("Start over", "restart overwrite"),
            ("Keep and use the best checkpoint", "save load"),
            ("Test a trained model on other data", "evaluate evaluation"),
            ("Predict new files", "inference"),
            (
                "Predict arrays in a web service",
                "inference server serve deploy api flask fastapi numpy",
            ),
            ("Hand a model over", "pack share"),
            ("Save the predictions for the test set", "extract outputs"),
            ("Get a confusion matrix", ""),
            ("Collect the outputs of a test", "attention hook observe rows save"),
            ("Add a metric from a function", "custom auc bleu sklearn whole test set"),
            ("Add a metric", "custom meter"),
            (
                "A metric per group of samples",
                "subgroup subgroups slices per domain domains missing modality ignore_index",
            ),
            ("Read the metrics in Python", "pandas dataframe history results"),
            ("Export to ONNX or safetensors", "torchscript jit"),
            ("Load the model without phasetrain", "torch.export"),
            ("Log to TensorBoard or Weights & Biases", "wandb tracker mlflow logger"),
            ("Log a number from my own code", "custom scalar log loss"),
            ("Compare learning rates over several seeds", ""),
            ("Compare two runs", ""),
            (
                "Compare with a plain loop",
                "debugging debug reproduce by hand initial weights check",
            ),
            ("Reproduce an old run", ""),
            ("Debug a NaN", "inf nonfinite"),
            ("Debug an error in my code", "traceback breakpoint pdb"),
            ("Submit to SLURM, and survive the time limit", ""),
            ("Change the number of GPUs on the way", ""),
            ("See where the time of a step goes", "profile profiler speed"),
            ("Save disk space", "checkpoints"),
            ("Watch many runs", ""),
        ),
        "docs/cookbook/training.md": (
            ("Combine two losses with weights", "several multiple auxiliary"),
            ("A loss weight that changes over the training", "anneal schedule"),
            ("Use two optimizers", "several multiple"),
            ("Train hidden matrices with Muon", ""),
            (
                "Give parts of the model different learning rates",
                "parameter groups layer lr discriminative no weight decay",
            ),
            ("Accumulate gradients", "gradient accumulation"),
            (
                "Change the learning rate at an epoch",
                "lr schedule custom function milestones step manual hand",
            ),
            ("Clip gradients", "gradient clipping norm group"),
            ("Train in mixed precision", "amp bf16 fp16"),
            ("Warm up, then decay with a cosine", ""),
            ("Average the weights (EMA)", ""),
            ("Stop early", "early stopping patience custom metric"),
            (
                "Fine-tune a new head, then everything",
                "finetune transfer freeze unfreeze frozen layers pretrained",
            ),
            ("Fine-tune with LoRA", "adapters peft finetune"),
            (
                "Calibrate a trained model",
                "temperature scaling calibration ece expected calibration error",
            ),
            ("Initialize weights with a function", "init initialization kaiming xavier"),
            ("Load weights with other names", "rename prefix state_dict pretrained"),
            ("Use a model of timm, torchvision or transformers", "pretrained huggingface"),
            ("Feed a transformer with a dictionary", ""),
            (
                "Let the model compute its own loss",
                "vae autoencoder anneal flow density estimation",
            ),
            ("Recognize sequences with CTC", "ctc speech alignment"),
            ("Keep state from batch to batch", "running mean queue memory stateful buffer"),
            (
                "Statistics that the model keeps itself",
                "vq vqvae vq-vae codebook ema buffer straight through perplexity of codes",
            ),
            (
                "Freeze statistics after some updates",
                "quantization aware training qat fake quantization observers batch norm eval",
            ),
            ("Draw noise in the forward pass", "diffusion ddpm vae denoising random"),
            (
                "Generate samples in a test",
                "metric of generated samples ema flow matching diffusion sampling",
            ),
            (
                "Perturb inputs by their gradients",
                "adversarial attack pgd fgsm virtual gradient penalty input",
            ),
            (
                "A persistent buffer of samples",
                "energy based model ebm replay buffer langevin contrastive divergence chains",
            ),
            ("Train a GAN", "two models alternate alternating adversarial several custom step"),
            ("Change settings in the middle of the training", "stages curriculum"),
            ("Check that the model can overfit one batch", ""),
            ("Find a learning rate and a batch size", ""),
            ("Train on several GPUs", "multi gpu ddp distributed multiple"),
            ("Train for a fixed time", ""),
            ("Generate text from a trained language model", ""),
            ("Fit a larger model into memory", "out of memory oom checkpointing"),
            (
                "Initialize from the data",
                "deep svdd center centre dependent initialization statistics mean first batch hook",
            ),
        ),
        "docs/data.md": (
            ("Custom samplers", "own sampler order"),
            ("Collation", "custom collate collate_fn padding"),
            ("Custom datasets and transforms", "own dataset"),
            ("Random draws of a dataset", "set_epoch redraw pairs hard negatives curriculum"),
        ),
        "docs/meters.md": (("Metrics of a split", "several test sets different metrics"),),
        "docs/phases.md": (
            ("The plan", "test validate evaluate every n epochs test_every interval"),
        ),
        "docs/task.md": (
            ("Several backward passes", "custom train step two backward passes"),
            ("Custom training loops", "own loop"),
        ),
        "docs/hooks.md": (("Custom hooks", "callback callbacks"),),
        "docs/sequences.md": (
            ("Sequence to sequence", "seq2seq translation encoder decoder"),
            ("A custom model", "Decodes decode start step beam greedy seq2seq"),
        ),
        "docs/loss.md": (("Custom losses", "own loss label smoothing"),),
        "docs/several-models.md": (
            ("Several models in one task", "two models alternately multiple"),
        ),
    }
)
"""Page of the docs -> headings of recipes, each with further words that people search for."""

PREFIX_LENGTH = 4
"""Number of first letters in which a word of a question agrees with a word of a recipe."""


def list_recipes(question: str) -> list[str]:
    """Return a line for each recipe whose heading or search words contain all words of a question.

    A single word is matched exactly. Of several words, only the first letters are compared.
    """
    asked = _split(question)
    length = None if len(asked) == 1 else PREFIX_LENGTH
    lines = []
    for page, recipes in RECIPES.items():
        for heading, words in recipes:
            prefixes = {word[:length] for word in _split(f"{heading} {words}")}
            if {word[:length] for word in asked} <= prefixes:
                lines.append(f"  {heading}: {page}")
    return lines


def _split(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
