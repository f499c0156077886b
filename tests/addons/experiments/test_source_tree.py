"""The commit, the changes and the diff of the source around a run, without secrets."""

import subprocess
from pathlib import Path

import pytest

from phasetrain.addons.experiments.source_tree import describe_source
from phasetrain.runtime.redaction import REDACTED, Redaction


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
