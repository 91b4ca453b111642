"""All families, training first, in the order of the data file."""

from dockyard_actors.tasks.functions import (
    heldout_lists,
    heldout_numbers,
    heldout_strings,
    train_lists,
    train_logic,
    train_mappings,
    train_numbers,
    train_strings,
)

FAMILIES = (
    *train_numbers.FAMILIES,
    *train_logic.FAMILIES,
    *train_strings.FAMILIES,
    *train_lists.FAMILIES,
    *train_mappings.FAMILIES,
    *heldout_numbers.FAMILIES,
    *heldout_strings.FAMILIES,
    *heldout_lists.FAMILIES,
)
