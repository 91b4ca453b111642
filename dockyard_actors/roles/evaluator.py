"""The evaluator role: an engine of its own that holds one version while training and rollouts go on.

The trainer pins a version (`UpdateWeights`) and asks for pass rates (`Evaluate`); nothing else reaches it.
"""

from __future__ import annotations

from dockyard_actors.roles.engine_host import EngineHost


class Evaluator(EngineHost):
    """Started when eval.every is set. It pulls nothing by itself."""

    async def on_start(self) -> None:
        await super().on_start()
        self.report("waits for a version to evaluate")
