from __future__ import annotations

import numpy as np
import pytest

from bench import trainstep
from bench.harness import Options
from dockyard_actors.policy.batch import TrainBatch
from tests.policy.models import random_group


def test_sides_that_train_something_else_are_not_compared(monkeypatch: pytest.MonkeyPatch):
    honest = trainstep.RowPerSample.loss
    monkeypatch.setattr(trainstep.RowPerSample, "loss", lambda *args: 1.01 * honest(*args))
    with pytest.raises(trainstep.UnfairComparison, match="fp32_loss_difference"):
        trainstep.run(Options(rounds=1, size="tiny"))


def test_what_shares_nothing_keeps_prompts_and_lengths_and_merges_nothing():
    group = random_group(9, [5, 5, 2, 7], [1.0, 1.0, 2.0, 3.0])
    group.tokens[1] = group.tokens[0]
    apart = trainstep.nothing_shared(group, 99, seed=0)
    batch = TrainBatch.build([apart], 1000)
    assert batch.merged_rows == 0
    assert batch.packed_tokens == 9 + sum(n - 1 for n in group.lengths)
    assert np.array_equal(apart.prompt_ids, group.prompt_ids)
    assert TrainBatch.build([group], 1000).merged_rows == 1
