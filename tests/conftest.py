"""Order of the tests, and where their shared fixtures come from: `support/fixtures.py`."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Processes that run tests get the fixtures; one that only hands them to workers need not import torch."""
    hands_out = config.getoption("tx", None) and not hasattr(config, "workerinput")
    if not hands_out:
        config.pluginmanager.import_plugin("support.fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin first, so that others fill the workers beside them."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
