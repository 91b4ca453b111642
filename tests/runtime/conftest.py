"""The runtime's tests run on uvloop, as role processes do."""

import pytest
import uvloop


@pytest.hookimpl
def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item):
    return {"uvloop": uvloop.new_event_loop}
