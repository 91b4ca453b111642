"""However the trainer holds its weights, an engine is handed those of the plain model, under the names of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from dockyard_actors.policy.refit import Refit, RefitError
from tests.policy.models import grouped_config, sharp_model


def checkpoint_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What `save_pretrained` would write: tied weights once."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_is_handed_out_as_its_checkpoint_without_copies(tied: bool) -> None:
    model = sharp_model(grouped_config(tie_word_embeddings=tied))
    refit, expected = Refit(model), checkpoint_of(model)
    handed = dict(refit.stream())
    assert handed.keys() == expected.keys() == refit.shapes.keys()
    for name, tensor in handed.items():
        assert tensor.data_ptr() == expected[name].data_ptr()
        assert not tensor.requires_grad


def test_a_model_sharded_over_two_ranks_is_handed_out_whole(tmp_path: Path) -> None:
    out = tmp_path / "handed.pt"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.policy.refit_rank", str(rank), "2", str(tmp_path / "store"), str(out)]
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    handed, expected = torch.load(out, weights_only=True), checkpoint_of(sharp_model(grouped_config()))
    assert handed.keys() == expected.keys()
    assert all(torch.equal(handed[name], tensor) for name, tensor in expected.items())


def test_adapters_are_merged_on_the_way_out_and_the_model_stays_as_it_is() -> None:
    plain = sharp_model(grouped_config())
    names = checkpoint_of(plain).keys()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(plain, config)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    refit = Refit(adapted)
    handed = {name: tensor.clone() for name, tensor in refit.stream()}
    assert handed.keys() == names
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())
    expected = checkpoint_of(adapted.merge_and_unload())
    for name, tensor in handed.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(
        handed[changed], before[f"base_model.model.{changed.replace('.weight', '.base_layer.weight')}"]
    )


def test_an_adapter_that_cannot_be_merged_here_is_refused_by_name() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    refit = Refit(get_peft_model(sharp_model(), config))
    with pytest.raises(RefitError, match=r"q_proj.*DoRA"):
        list(refit.stream())


def test_a_fused_parameter_is_handed_out_in_its_parts() -> None:
    model = torch.nn.ModuleDict({"qkv": torch.nn.Linear(3, 8, bias=False), "o": torch.nn.Linear(8, 3, bias=False)})
    refit = Refit(model, {"qkv.weight": (("q.weight", 4), ("k.weight", 2), ("v.weight", 2))})
    assert refit.shapes == {"q.weight": (4, 3), "k.weight": (2, 3), "v.weight": (2, 3), "o.weight": (3, 8)}
    handed = dict(refit.stream())
    assert torch.equal(torch.cat([handed["q.weight"], handed["k.weight"], handed["v.weight"]]), model["qkv"].weight)
    assert torch.equal(handed["o.weight"], model["o"].weight)


@pytest.mark.parametrize(
    ("fused", "reason"),
    [
        ({"qkv.weight": (("q.weight", 4), ("k.weight", 3))}, r"qkv.weight has 8 rows and its parts 4 \+ 3"),
        ({"qkv.weight": (("o.weight", 8),)}, "o.weight would be handed out twice"),
        ({"kv.weight": (("k.weight", 8),)}, "the model does not have: kv.weight"),
    ],
)
def test_a_mapping_that_does_not_fit_the_model_is_refused(fused: dict, reason: str) -> None:
    model = torch.nn.ModuleDict({"qkv": torch.nn.Linear(3, 8, bias=False), "o": torch.nn.Linear(8, 3, bias=False)})
    with pytest.raises(RefitError, match=reason):
        Refit(model, fused)
