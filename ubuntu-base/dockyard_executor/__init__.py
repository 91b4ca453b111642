"""The task executor: takes programs over HTTP, runs them isolated, returns typed verdicts.

Imports nothing of `dockyard_actors` and no torch, so that the package runs alone in a container image.
"""
