"""Text and sequences: language models, translation between sequences, time series."""

from phasetrain.config.addons import AddOn, Command

PACKAGE = "phasetrain.addons.text"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_commands(
        Command(
            "tokenize",
            "OUT INPUT...",
            "write texts as token files for the dataset tokens",
            f"{PACKAGE}.tokenize.command:run_tokenize",
            arguments=f"{PACKAGE}.tokenize.command:add_tokenize_arguments",
        )
    )
    addon.add_parts(
        "task",
        {
            "language_model": f"{PACKAGE}.language_model",
            "sequence_to_sequence": f"{PACKAGE}.sequence_to_sequence",
        },
    )
    addon.add_parts(
        "model",
        {
            "seq2seq_gru": f"{PACKAGE}.models.gru",
            "series_fcn": f"{PACKAGE}.models.time_series",
            "series_resnet": f"{PACKAGE}.models.time_series",
            "seq2seq_transformer": f"{PACKAGE}.models.transformer",
            "transformer": f"{PACKAGE}.transformer",
        },
    )
    addon.add_parts(
        "meter",
        {
            "perplexity": f"{PACKAGE}.perplexity",
            "bits_per_byte": f"{PACKAGE}.perplexity",
            "token_error_rate": f"{PACKAGE}.sequence_errors",
            "sequence_error_rate": f"{PACKAGE}.sequence_errors",
        },
    )
    addon.add_parts(
        "dataset",
        {
            "alice": f"{PACKAGE}.blocks",
            "lines": f"{PACKAGE}.lines",
            "text": f"{PACKAGE}.blocks",
            "tokens": f"{PACKAGE}.tokens.dataset",
            "cmudict": f"{PACKAGE}.sequences.cmudict",
            "ucr": f"{PACKAGE}.sequences.ucr",
        },
    )
    addon.add_parts(
        "sampler",
        {
            "lanes": f"{PACKAGE}.lanes",
            "length_bucketed": f"{PACKAGE}.length_buckets",
        },
    )
    generation = f"{PACKAGE}.generation"
    addon.add_service("find_text_source", f"{generation}.services:find_text_source")
    addon.add_service("generate_text", f"{generation}.services:generate_text")
    addon.add_service("make_sampling", f"{generation}.sampling:Sampling")
    addon.add_service("open_dataset_codec", f"{generation}.find_codec:open_dataset_codec")
    addon.add_service("read_tokenizer", f"{PACKAGE}.tokens.tokenizers:LibraryCodec")
