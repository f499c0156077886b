"""Paths of this machine need no add-on; URLs name the one that they need."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from phasetrain.config import addons
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import (
    Storage,
    fetch,
    list_urls,
    open_copies,
    open_run_storage,
    open_storage,
    stat_url,
)


@pytest.mark.parametrize(
    "access", [open_storage, open_run_storage, open_copies, fetch, stat_url, list_urls]
)
def test_url_without_the_addon_names_it(
    access: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addons, "load_addons", lambda: ())
    with raises(ConfigError, code="addon.missing") as caught:
        access("s3://me:word@bucket/a")
    assert "the add-on 'remote'" in str(caught.value)
    assert "s3://(redacted)@bucket/a" in str(caught.value)


@pytest.mark.parametrize("access", [open_storage, open_run_storage])
def test_path_of_this_machine_needs_no_addon(
    access: Callable[[str], Storage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(addons, "load_addons", lambda: ())
    assert type(access(str(tmp_path))) is Storage
    assert access("runs/x").keeps_files
    with raises(ConfigError, code="storage.file_url"):
        access("file:///data/a")
