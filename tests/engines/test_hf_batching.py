"""Groups that run beside each other in the HF engine, and the memory that they share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_actors.engines.base import GroupRequest, SamplingConfig
from dockyard_actors.engines.hf import HFEngineConfig
from dockyard_actors.engines.kvcache import GROWTH
from tests.engines.hf_run import Run, clean, undisturbed
from tests.policy.models import generate, requests_of


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 25), min_size=4, max_size=4), st.permutations(range(4)), st.sampled_from([None, 9, 6, 3])
)
def test_groups_that_join_while_others_run_are_what_they_are_alone(delays, order, rows):
    requests, expected = undisturbed()
    run = Run(engine=HFEngineConfig(max_batch_rows=rows) if rows else None)
    for delay, index in zip(delays, order, strict=True):
        run.step(delay)
        run.submit(requests[index])
    run.finish()
    run.same_as(requests, expected)


def test_groups_of_other_sampling_run_beside_each_other_and_keep_their_own():
    greedy = SamplingConfig(temperature=0.7, max_new_tokens=40, greedy=True)
    requests, expected = undisturbed()
    others = generate(clean(0), requests, greedy).outputs
    run = Run()
    for request in requests:
        run.submit(request)
        run.submit(replace(request, key=request.key + 10), sampling=greedy)
        run.step(3)
    run.finish()
    run.same_as([*requests, *(replace(r, key=r.key + 10) for r in requests)], [*expected, *others])


def test_the_first_in_the_queue_is_not_overtaken_by_smaller_ones():
    run = Run(engine=HFEngineConfig(max_batch_rows=6))
    first, large, small = requests_of(n=4)[:3]
    run.submit(first)
    run.step()
    run.submit(large, replace(small, n=1, seeds=small.seeds[:1]))
    while first.key not in run.done:
        run.step()
        lengths = [run.outputs[request.key].lengths.max() for request in (large, small)]
        assert lengths[1] <= lengths[0]
    run.finish()


def test_rows_that_follow_one_another_for_long_do_not_widen_the_cache():
    run = Run()
    widest, sampling = 0, SamplingConfig(max_new_tokens=20)
    requests = requests_of(n=2)
    need = max(request.prompt_ids.size for request in requests) + 20
    for key in range(40):
        run.submit(replace(requests[key % 4], key=key), sampling=sampling)
        run.step(5)
        widest = max(widest, *(batch.cache.width for batch in run.engine._batches))
        assert len(run.engine._batches) == 1
    assert widest <= need + 2 * GROWTH


def test_what_runs_fits_the_memory_and_uses_it():
    requests, expected = undisturbed(n=12)
    room = 7 * (max(request.prompt_ids.size for request in requests) + 40)
    run = Run(engine=HFEngineConfig(max_batch_tokens=room))
    run.submit(*requests)
    run.finish()
    assert room * 0.6 < max(run.gauge.tokens) <= room
    run.same_as(requests, expected)


def test_short_rows_stay_apart_from_a_long_one_where_its_width_would_be_too_much_for_all():
    short = requests_of(n=8)[2]
    long = GroupRequest(9, np.resize(short.prompt_ids, 300), 1, (4,))
    for room, together in ((800, False), (4000, True)):
        run = Run(engine=HFEngineConfig(max_batch_tokens=room))
        run.submit(long)
        run.step()
        run.submit(short)
        run.step(3)
        joined = int((run.outputs[short.key].lengths == 3).sum())
        assert joined > 4
        assert run.gauge.rows[3] == joined + 1
        assert (run.gauge.tokens[3] > 800) == together
        run.finish()
        assert max(run.gauge.tokens) <= room


def test_a_group_that_no_empty_engine_could_hold_runs_in_parts():
    requests, expected = undisturbed(n=12)
    run = Run(engine=HFEngineConfig(max_batch_rows=5))
    run.submit(*requests)
    run.finish()
    assert max(run.gauge.rows) == 5
    run.same_as(requests, expected)


def test_a_prompt_is_prefilled_once_for_its_group_also_after_an_update():
    run = Run()
    seen: dict[int, int] = {}  # rows by positions of a forward pass

    def count(module: object, args: object, kwargs: dict, output: object) -> None:
        rows, positions = kwargs["input_ids"].shape
        seen[positions] = rows

    run.engine.model.register_forward_hook(count, with_kwargs=True)
    requests = requests_of(n=6)
    run.submit(*requests)
    run.step(3)
    longest = max(request.prompt_ids.size for request in requests)
    assert seen.keys() == {longest, 1}
    assert seen[longest] == 4
    alive = sum(int((output.lengths == 3).sum()) for output in run.outputs.values())
    seen.clear()
    run.update(seed=5, version=1)
    run.step()
    assert seen.keys() == {longest, 3}
    assert seen[longest] == 4
    assert 4 < seen[3] <= alive
