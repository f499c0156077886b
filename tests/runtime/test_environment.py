"""What is known of where a run takes place, and that no secret is in it."""

import os
import sys

import pytest

from phasetrain.runtime.environment import (
    describe_host,
    describe_numerics,
    list_devices,
    list_distributions,
    list_variables,
)
from phasetrain.runtime.redaction import REDACTED, Redaction, has_secrets, restore_secrets


class TestSecrets:
    @pytest.mark.parametrize(
        ("text", "clean"),
        [
            ("postgres://user:pass@db/x", f"postgres://{REDACTED}@db/x"),
            ("https://h/x?a=1&access_token=abc", f"https://h/x?a=1&access_token={REDACTED}"),
            (
                "s3: https://h/x?X-Amz-Date=1&X-Amz-Credential=a&id=5&X-Amz-Signature=b",
                f"s3: https://h/x?X-Amz-Date={REDACTED}&X-Amz-Credential={REDACTED}&id=5"
                f"&X-Amz-Signature={REDACTED}",
            ),
            ("https://h/x?se=2026&sig=a%2B", f"https://h/x?se={REDACTED}&sig={REDACTED}"),
            ("ghp_" + "a1" * 12, REDACTED),
            ("password: 'correct-horse-1'", f"password: '{REDACTED}'"),
            (
                "tokens = 128, pad_token = '<pad>', https://h/x",
                "tokens = 128, pad_token = '<pad>', https://h/x",
            ),
        ],
    )
    def test_in_texts(self, text: str, clean: str) -> None:
        assert Redaction({}).redact_text(text) == clean

    def test_in_words_of_the_command_line(self) -> None:
        words = [
            "HOOKS.wandb.api_key=12",
            "MODEL.max_tokens=3",
            "MODEL.pad_token='<pad>'",
            "HOOKS.x={name: wandb, api_key: 'a, b', auth: {user: me, password: word}, pass: null}",
            "+HOOKS.x.token='a b'",
            "RUN.dir=x",
        ]
        expected = [
            f"HOOKS.wandb.api_key='{REDACTED}'",
            "MODEL.max_tokens=3",
            "MODEL.pad_token='<pad>'",
            f"HOOKS.x={{name: wandb, api_key: '{REDACTED}', auth: {{user: me, password: "
            f"'{REDACTED}'}}, pass: null}}",
            f"+HOOKS.x.token='{REDACTED}'",
            "RUN.dir=x",
        ]
        assert Redaction({}).redact_words(words) == expected

    def test_in_configs(self) -> None:
        config = {
            "HOOKS": {"x": {"api_key": "abc", "token": None, "auth": {"user": "me", "pwd": 1234}}},
            "DATA": {"TRAIN": {"input_key": "image", "url": "s3://me:word@host", "n": 3}},
            "MODEL": {"mask_token": "[MASK]", "tokens": 9, "bypass": True},
        }
        found = Redaction({}).redact_config(config)
        assert found == {
            "HOOKS": {
                "x": {"api_key": REDACTED, "token": None, "auth": {"user": "me", "pwd": REDACTED}}
            },
            "DATA": {"TRAIN": {"input_key": "image", "url": f"s3://{REDACTED}@host", "n": 3}},
            "MODEL": {"mask_token": "[MASK]", "tokens": 9, "bypass": True},
        }
        assert Redaction({}).redact_config(found) == found
        assert restore_secrets(found, config) == config
        assert restore_secrets(found, None) == found
        assert has_secrets(config)
        assert not has_secrets(config["MODEL"])

    def test_in_variables(self) -> None:
        given = {
            "OMP_NUM_THREADS": "2",
            "HF_TOKEN": "hf_x",
            "WANDB_API_KEY": "k",
            "MY_PASSWORD": "long-enough",
            "HF_AUTH": "some-words",
            "MLFLOW_PASS": "other-words",
            "PWD": "/somewhere",
            "HOME": "/h",
        }
        given["WANDB_BASE_URL"] = "https://a:b@c/long-enough"
        assert list_variables(given) == {
            "HF_AUTH": REDACTED, "HF_TOKEN": REDACTED, "MLFLOW_PASS": REDACTED, "OMP_NUM_THREADS": "2", "WANDB_API_KEY": REDACTED,
            "WANDB_BASE_URL": f"https://{REDACTED}@c/{REDACTED}",
        }  # fmt: skip


def test_packages_and_machine() -> None:
    found = list_distributions(sys.path)
    assert found["torch"].partition("+")[0] == "2.13.0" or found["torch"]
    assert "pytest" in found
    assert list_distributions(["/no/such/folder"]) == {}
    assert describe_host()["cores"] == os.cpu_count()
    assert list_devices("cpu") == []
    assert describe_numerics(deterministic=True)["deterministic"] is True
