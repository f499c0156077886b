"""A plugin of pytest: the fixture `audit`, which fails a test whose script does not resume exactly.

Name it in `conftest.py`: `pytest_plugins = ["phasetrain.addons.audit.plugin"]`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from phasetrain.addons.audit.auditor import Audit
from phasetrain.addons.audit.auditor import audit as run_audit
from phasetrain.addons.audit.text import format_audit


@pytest.fixture
def audit() -> Callable[..., Audit]:
    """Return a function that audits a command, with the arguments of `phasetrain.audit`.

    It fails the test unless a killed and resumed run equals one that was not killed.
    """

    def check(command: str | Sequence[str], **options: Any) -> Audit:
        verdict = run_audit(command, **options)
        if verdict.exit_code:
            pytest.fail(format_audit(verdict), pytrace=False)
        return verdict

    return check
