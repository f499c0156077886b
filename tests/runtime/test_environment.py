"""What is known of where a run takes place, and that no secret is in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phasetrain.runtime.environment import (
    describe_host,
    describe_numerics,
    list_devices,
    list_distributions,
    list_variables,
)
from phasetrain.runtime.redaction import REDACTED, Redaction, has_secrets, restore_secrets
from phasetrain.runtime.source_tree import describe_source


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "sub").mkdir(parents=True)
    (top / "code.py").write_text("A = 1\nB = 2\n")
    (top / ".gitignore").write_text("ignored.py\n")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "one")
    git(top, "remote", "add", "origin", "https://me:hunter22@host.org/a.git")
    return top


class TestSource:
    def test_of_a_clean_tree(self, tree: Path) -> None:
        found = describe_source(tree / "sub", Redaction({}), diff="git.diff")
        assert found is not None
        assert found.diff == b""
        assert found.facts == {
            "folder": str(tree), "prefix": "sub/", "commit": git(tree, "rev-parse", "HEAD"), "branch": "main",
            "remote": f"https://{REDACTED}@host.org/a.git", "changed": False, "untracked": [], "diff": None,
            "diff_bytes": 0, "redacted": False,
        }  # fmt: skip

    def test_the_diff_makes_the_tree_of_the_run(self, tree: Path, tmp_path: Path) -> None:
        git(tmp_path, "clone", "-q", str(tree), "clone")
        (tree / "code.py").write_text("A = 1\nB = 3\n")
        (tree / "new.py").write_text("C = 4\r\nno end")
        (tree / "empty.py").touch()
        (tree / "ignored.py").write_text("x")
        (tree / "data.bin").write_bytes(b"\0" * 100)
        (tree / "runs" / "one").mkdir(parents=True)
        (tree / "runs" / "one" / "status.json").write_text("{}")
        (tree / "runs" / "one" / "config.yaml").write_text("a: 1\n")
        (tree / "mine").mkdir()
        (tree / "mine" / "config.yaml").write_text("a: 1\n")
        found = describe_source(tree, Redaction({}), diff="git.diff", skip=tree / "mine")
        assert found is not None
        assert found.facts["untracked"] == ["data.bin", "empty.py", "new.py"]
        assert (found.facts["changed"], found.facts["diff"]) == (True, "git.diff")
        (tmp_path / "git.diff").write_bytes(found.diff)
        git(tmp_path / "clone", "apply", "../git.diff")
        for name in ("code.py", "new.py", "empty.py"):
            assert (tmp_path / "clone" / name).read_bytes() == (tree / name).read_bytes()
        assert not (tmp_path / "clone" / "data.bin").exists()

    def test_secrets_in_the_source_are_taken_out(self, tree: Path) -> None:
        (tree / "code.py").write_text(
            'A = "https://me:pw123@host/x"\napi_key = "abcd1234efgh5678"\nB = "s3cr3t-value"\n'
        )
        found = describe_source(tree, Redaction({"MY_TOKEN": "s3cr3t-value"}), diff="git.diff")
        assert found is not None
        assert found.facts["redacted"] is True
        assert not any(secret in found.diff for secret in (b"pw123", b"abcd1234", b"s3cr3t"))
        assert found.diff.count(REDACTED.encode()) == 3

    def test_without_a_tree_or_without_git(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert describe_source(tmp_path, Redaction({}), diff="git.diff") is None
        monkeypatch.setenv("PATH", str(tmp_path))
        assert describe_source(tree, Redaction({}), diff="git.diff") is None

    def test_a_tree_without_a_commit(self, tmp_path: Path) -> None:
        git(tmp_path, "init", "-q")
        assert describe_source(tmp_path, Redaction({}), diff="git.diff") is None


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
