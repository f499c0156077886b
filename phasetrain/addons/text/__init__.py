"""Text and sequences: language models, translation between sequences, time series."""

from phasetrain.config.addons import AddOn

PACKAGE = "phasetrain.addons.text"


def register(addon: AddOn) -> None:
    """Declare what this add-on adds."""
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
            "cmudict": f"{PACKAGE}.sequences.cmudict",
            "ucr": f"{PACKAGE}.sequences.ucr",
        },
    )
