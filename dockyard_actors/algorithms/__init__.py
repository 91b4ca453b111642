"""Advantages, policy losses, off-policy corrections and their diagnostics. Imports torch only; `types` not even that."""
