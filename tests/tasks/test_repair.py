"""The tiny repair language: deterministic, honest hold-out, tests that tell right from wrong."""

import random
from itertools import islice

import pytest

from dockyard_actors.tasks import repair
from dockyard_actors.tasks.answer import build_program
from dockyard_actors.tasks.dataset import encode_tasks, load_tasks, parse_tasks


def passes(program: object, tests) -> list[bool]:
    assert isinstance(program, str)
    namespace: dict = {}
    exec(program, namespace)
    results = []
    for test in tests:
        try:
            exec(test, namespace)
            results.append(True)
        except AssertionError:
            results.append(False)
    return results


def test_the_shipped_set_is_the_same_every_time_and_a_valid_task_file():
    tasks = load_tasks("repair")
    assert len(tasks.train) >= 2000
    assert len(tasks.heldout) >= 128
    assert repair.make_tasks(3, 40, 10) == repair.make_tasks(3, 40, 10)
    assert repair.make_tasks(3, 40, 10) != repair.make_tasks(4, 40, 10)
    assert parse_tasks(encode_tasks(tasks.all), "repair") == tasks


def test_prompts_and_ids_are_unique():
    tasks = load_tasks("repair").all
    assert len({task.prompt for task in tasks}) == len({task.id for task in tasks}) == len(tasks)


def test_the_right_hunk_passes_everything_and_the_bug_fails_something():
    for task in load_tasks("repair").all:
        tests = task.tests + task.hidden_tests
        assert all(passes(build_program(task, task.target), tests)), task.id
        assert not all(passes(task.prefix, tests)), task.id


def test_no_training_prompt_or_warmup_pair_asks_for_a_held_out_combination():
    def asked_for(prompt: str) -> str:
        return prompt.split("\n")[0]  # signature and intent: all that decides the right answer

    tasks = load_tasks("repair")
    heldout = {asked_for(task.prompt) for task in tasks.heldout}
    train = {asked_for(task.prompt) for task in tasks.train}
    warmup = {asked_for(prompt) for prompt, _ in islice(repair.warmup_pairs(random.Random(5)), 5000)}
    assert not heldout & train
    assert not heldout & warmup
    assert len({task.family for task in tasks.heldout}) == len(repair.FAMILIES)


def test_the_warmup_corpus_is_as_noisy_as_it_says():
    pairs = list(islice(repair.warmup_pairs(random.Random(1)), 4000))
    unchanged = sum(answer.split("\n")[0][1:] == answer.split("\n")[1][1:] for _, answer in pairs) / len(pairs)
    assert 0.27 < unchanged < 0.36  # 0.30 and the random expressions that happen to be the bug again
    assert all(answer.startswith("- return ") and answer.endswith("\n") for _, answer in pairs)
    assert pairs == list(islice(repair.warmup_pairs(random.Random(1)), 4000))


def test_answers_fit_their_token_limit():
    assert all(len(task.target) < repair.MAX_NEW_TOKENS for task in load_tasks("repair").all)


def test_asking_for_more_tasks_than_exist_is_refused():
    with pytest.raises(ValueError, match="heldout"):
        repair.make_tasks(0, 0, 50_000)
