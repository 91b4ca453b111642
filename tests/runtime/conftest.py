"""The runtime's tests run on uvloop, as role processes do, and leave nothing behind, each of them."""

import pytest
import uvloop

from tests.leaks import nothing_is_left_by_a_test

__all__ = ["nothing_is_left_by_a_test"]


@pytest.hookimpl
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item):
    return {"uvloop": uvloop.new_event_loop}
