from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from dockyard_actors.algorithms.types import AdvantageConfig, CorrectionConfig, LossConfig, validate

TIS = CorrectionConfig(kind="tis")
NONE = CorrectionConfig()


def test_types_can_be_imported_without_torch():
    code = "import sys, dockyard_actors.algorithms.types; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_defaults_are_sound_in_sync_mode_and_with_tis_in_async_mode():
    assert validate(AdvantageConfig(), LossConfig(), NONE, "sync", group_size=2) == []
    assert validate(AdvantageConfig(), LossConfig(), TIS, "async") == []


@pytest.mark.parametrize("kind", ["ppo", "grpo", "reinforce"])
def test_async_without_correction_is_refused(kind):
    (reason,) = validate(AdvantageConfig(), LossConfig(kind=kind), NONE, "async")
    assert reason.startswith("correction.kind: 'none' in async mode")


def test_m2po_is_its_own_correction():
    m2po = LossConfig(kind="m2po")
    assert validate(AdvantageConfig(), m2po, NONE, "async") == []
    (reason,) = validate(AdvantageConfig(), m2po, TIS, "async")
    assert "twice" in reason


@pytest.mark.parametrize(
    ("advantage", "loss", "correction", "group_size", "field"),
    [
        ({}, {"reduction": "constant"}, {}, None, "loss.constant_length"),
        ({}, {"reduction": "token", "constant_length": 8}, {}, None, "loss.constant_length"),
        ({}, {"reduction": "constant", "constant_length": 0}, {}, None, "loss.constant_length"),
        ({}, {"kind": "reinforce", "dual_clip": 3.0}, {}, None, "loss.dual_clip"),
        ({}, {"dual_clip": 1.0}, {}, None, "loss.dual_clip"),
        ({}, {"ratio_clip_low": 1.5}, {}, None, "loss.ratio_clip_low"),
        ({}, {"ratio_clip_high": 0.0}, {}, None, "loss.ratio_clip_high"),
        ({}, {"kl_coef": -0.1}, {}, None, "loss.kl_coef"),
        ({}, {"kl_coef": float("nan")}, {}, None, "loss.kl_coef"),
        ({}, {"m2_threshold": 0.0}, {}, None, "loss.m2_threshold"),
        ({}, {"kind": "pp0"}, {}, None, "loss.kind"),
        ({"eps": 0.0}, {}, {}, None, "advantage.eps"),
        ({"estimator": "gae"}, {}, {}, None, "advantage.estimator"),
        ({"normalize_by_std": True}, {}, {}, None, "advantage.normalize_by_std"),
        ({"estimator": "rloo"}, {}, {}, 1, "advantage.estimator"),
        ({}, {}, {"kind": "tis", "tis_min": 3.0}, None, "correction.tis_min"),
        ({}, {}, {"kind": "tis", "tis_max": float("inf")}, None, "correction.tis_max"),
    ],
)
def test_every_refusal_names_its_field(advantage, loss, correction, group_size, field):
    reasons = validate(
        replace(AdvantageConfig(), **advantage),
        replace(LossConfig(), **loss),
        replace(CorrectionConfig(), **correction),
        "sync",
        group_size,
    )
    assert [reason.split(":")[0] for reason in reasons] == [field]


def test_rloo_may_divide_by_the_group_std():
    assert validate(AdvantageConfig(estimator="rloo", normalize_by_std=True), LossConfig(), NONE, "sync", 2) == []


def test_every_reason_is_given_at_once():
    loss = LossConfig(kind="m2po", reduction="constant", kl_coef=-1.0)
    assert len(validate(AdvantageConfig(eps=0.0), loss, TIS, "async")) == 4
