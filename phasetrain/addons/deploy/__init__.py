"""Deployment: predictions, packed models, exports, extracted features."""

from phasetrain.config.addons import AddOn, Command, Engine

MODEL_COMMANDS = "phasetrain.addons.deploy.model_commands"
TEXT_COMMANDS = "phasetrain.addons.deploy.text_commands"
ENGINE_COMMANDS = "phasetrain.cli.train_commands"
FEATURE_COMMANDS = "phasetrain.addons.deploy.feature_commands"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_commands(
        Command(
            "predict",
            "RUN_FOLDER|MODEL.zip FILE... [OVERRIDE ...]",
            "predict for images, arrays, tables or text with the model of a run, or a packed one",
            f"{MODEL_COMMANDS}:run_predict",
            takes_overrides=True,
            arguments=f"{MODEL_COMMANDS}:add_predict_arguments",
            engine="test",
            config_words=f"{MODEL_COMMANDS}:list_config_words",
        ),
        Command(
            "generate",
            "RUN_FOLDER|MODEL.zip [--prompt TEXT ...] [OVERRIDE ...]",
            "continue texts with the language model of a run",
            f"{TEXT_COMMANDS}:run_generate",
            takes_overrides=True,
            arguments=f"{TEXT_COMMANDS}:add_generate_arguments",
        ),
        Command(
            "extract",
            "[RUN_FOLDER] [OVERRIDE ...]",
            "write features and predictions for every sample",
            f"{ENGINE_COMMANDS}:run_engine",
            takes_overrides=True,
            arguments=f"{ENGINE_COMMANDS}:add_checkpoint_flags",
            engine="extract",
        ),
        Command(
            "export",
            "RUN OUT [OVERRIDE ...]",
            "write weights or a model from a checkpoint: safetensors, Hugging Face, torch.export, "
            "ONNX",
            f"{MODEL_COMMANDS}:run_export",
            takes_overrides=True,
            arguments=f"{MODEL_COMMANDS}:add_export_arguments",
        ),
        Command(
            "pack",
            "RUN MODEL.zip",
            "write a model with transforms, class names, an example and a card to one file",
            f"{MODEL_COMMANDS}:run_pack",
            arguments=f"{MODEL_COMMANDS}:add_pack_arguments",
        ),
        Command(
            "probe",
            "--train FOLDER --test FOLDER --layer LAYER",
            "evaluate extracted features with nearest neighbours and a linear classifier",
            f"{FEATURE_COMMANDS}:run_probe",
            arguments=f"{FEATURE_COMMANDS}:add_probe_arguments",
        ),
        Command(
            "cluster",
            "FOLDER... --layer LAYER --clusters K",
            "label samples by k-means of extracted features",
            f"{FEATURE_COMMANDS}:run_cluster",
            arguments=f"{FEATURE_COMMANDS}:add_cluster_arguments",
        ),
        Command(
            "consolidate",
            "CHECKPOINT OUT",
            "write a sharded checkpoint as one safetensors file",
            f"{FEATURE_COMMANDS}:run_consolidate",
            arguments=f"{FEATURE_COMMANDS}:add_consolidate_arguments",
        ),
    )
    addon.add_engines(
        Engine(
            "extract",
            "phasetrain.addons.deploy.extract.extract:extract",
            needs_training_data=False,
            runs_as_job=True,
        )
    )
    addon.add_section("EXTRACT", "phasetrain.addons.deploy.extract.section:ExtractSection")
    addon.add_service(
        "make_input_reader", "phasetrain.addons.deploy.predict.raw_inputs:InputReader"
    )
    addon.add_service(
        "complete_from_record", "phasetrain.addons.deploy.recorded_facts:complete_from_record"
    )
    addon.add_service(
        "build_input_transform", "phasetrain.addons.deploy.input_transform:build_input_transform"
    )
    addon.add_service(
        "complete_weights", "phasetrain.addons.deploy.complete_weights:complete_weights"
    )
    addon.add_service("read_pack", "phasetrain.addons.deploy.pack.weights:read_pack")
    addon.add_name("PackedModel", "phasetrain.addons.deploy.pack.load_pack:PackedModel")
    addon.add_name("load_pack", "phasetrain.addons.deploy.pack.load_pack:load_pack")
    addon.add_name("pack", "phasetrain.addons.deploy.pack.pack:pack")
