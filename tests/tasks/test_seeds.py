"""Orders and sampling seeds: stable, complete, spread."""

from hypothesis import given
from hypothesis import strategies as st

from dockyard_actors.tasks.seeds import epoch_order, sample_seed


def test_seeds_are_the_same_on_every_machine_and_python():
    assert sample_seed(0, "clamp-0001", 0, 0) == 16532586981854576346
    assert epoch_order(0, 0, 8) == [7, 4, 3, 5, 1, 2, 0, 6]


def test_every_field_changes_the_seed():
    seeds = {sample_seed(r, p, e, s) for r in (0, 1, -1) for p in ("a", "ab", "b") for e in range(4) for s in range(16)}
    assert len(seeds) == 3 * 3 * 4 * 16


@given(st.integers(), st.text(), st.integers(0), st.integers(0))
def test_a_seed_fits_64_bits(run_seed, prompt, epoch, index):
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        return
    assert 0 <= sample_seed(run_seed, prompt, epoch, index) < 2**64


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(0, 200))
def test_an_epoch_visits_every_task_once(seed, epoch, n):
    assert sorted(epoch_order(seed, epoch, n)) == list(range(n))


def test_epochs_and_seeds_give_different_orders():
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
