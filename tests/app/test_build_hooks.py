from phasetrain.app.build_hooks import flatten_config, redact_secrets


def test_what_leaves_the_run_folder_has_no_secrets() -> None:
    config = {
        "HOOKS": {"mine": {"api_key": "abc", "every": 10}},
        "RUN": {"dir": "https://me:word@host/x", "seed": 1},
    }
    found = redact_secrets(flatten_config(config), {"MY_TOKEN": "0123456789"})
    assert found["RUN.seed"] == 1
    assert found["HOOKS.mine.every"] == 10
    assert "abc" not in str(found)
    assert "word" not in str(found)
    assert "0123456789" not in str(
        redact_secrets({"LOSS.name": "x0123456789y"}, {"MY_TOKEN": "0123456789"})
    )
