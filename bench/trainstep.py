"""One GRPO training step: ours (shared beginnings computed once, bfloat16 autocast) against one row per sample.

The peers are plain transformers forward passes with the same loss, optimizer, threads and data: float32 with full logits,
and bfloat16 autocast with logits at the completion alone; each with the rows per pass that suit it best. Prompts are shipped tasks,
completions are sampled by the model that is trained. Refuses to compare what does not compute the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.harness import Figures, Options, alternate, figure, median, note, ratio, timed
from dockyard_actors.algorithms.losses import LossResult, policy_loss
from dockyard_actors.algorithms.reduction import Denominators
from dockyard_actors.algorithms.types import CorrectionConfig, LossConfig
from dockyard_actors.policy.batch import GroupRows, TrainBatch
from dockyard_actors.policy.model import eos_ids, load_model, load_tokenizer
from dockyard_actors.policy.policy import LossInputs, Policy
from dockyard_actors.policy.types import OptimizerConfig, PolicyConfig
from dockyard_actors.tasks.dataset import load_tasks
from dockyard_actors.tasks.types import Task

GROUPS, SAMPLES, SEED = 4, 8, 0
ROWS_PER_PASS = (1, 4, 8)
LOSS, CORRECTION = LossConfig(), CorrectionConfig(kind="tis")
OPTIMIZER = OptimizerConfig(
    lr=1e-9, warmup_steps=0, clip_norm=0.0
)  # every round trains the same weights, and meets its gradient
LOSS_AGREES, GRADIENT_AGREES, BF16_AGREES = 1e-5, 1e-4, 0.98


class UnfairComparison(RuntimeError):
    """The sides do not compute the same loss and gradient: their times say nothing."""


Gradient = list[torch.Tensor]


@dataclass
class Caught:
    loss: float = 0.0
    gradient: Gradient | None = None


def run(options: Options) -> Figures:
    """`grpo_step_speedup` against float32 with full logits, `grpo_step_speedup_bf16` against bfloat16 autocast."""
    torch.set_num_threads(options.threads)
    full = options.size == "full"
    source, tasks = ("smollm2-135m", "functions") if full else ("tiny", "repair")
    model, tokenizer = load_model(source), load_tokenizer(source)
    note(f"sampling {GROUPS} x {SAMPLES} completions")
    groups = sample_groups(copy.deepcopy(model), tokenizer, chosen_tasks(load_tasks(tasks).train), full)
    apart = [nothing_shared(group, len(tokenizer), SEED + i) for i, group in enumerate(groups)]
    ours = Ours(Policy(copy.deepcopy(model), tokenizer, PolicyConfig(threads=options.threads), OPTIMIZER))
    peer = RowPerSample(model)
    agreement = check_agreement(ours, peer, groups)
    rows = {bf16: best_rows(peer, groups, bf16) for bf16 in (False, True)}
    sides: dict[str, Callable[[], object]] = {
        "ours": partial(ours.step, groups, bf16=True),
        "ours, nothing shared": partial(ours.step, apart, bf16=True),
        "fp32": partial(peer.step, groups, bf16=False, rows=rows[False]),
        "bf16": partial(peer.step, groups, bf16=True, rows=rows[True]),
    }
    spans = alternate(sides, options.rounds)
    data = describe(groups, apart) | {"threads": options.threads, "rounds": options.rounds}
    figures = {}
    for key, name, bf16 in (("grpo_step_speedup", "fp32", False), ("grpo_step_speedup_bf16", "bf16", True)):
        figures[key] = figure(
            ratio(spans[name], spans["ours"]),
            "x",
            in_cpu_seconds=round(ratio(spans[name], spans["ours"], "cpu"), 2),
            nothing_shared_but_prompts=round(ratio(spans[name], spans["ours, nothing shared"]), 2),
            seconds={side: round(median(spans[side]), 3) for side in ("ours", "ours, nothing shared", name)},
            peer_rows_per_pass=rows[bf16],
            **agreement,
            **data,
        )
    return figures


# ---- data


def chosen_tasks(tasks: Sequence[Task]) -> list[Task]:
    return [tasks[i] for i in np.random.default_rng(SEED).choice(len(tasks), GROUPS, replace=False)]


@torch.no_grad()
def sample_groups(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], bf16: bool
) -> list[GroupRows]:
    """Groups as a rollout would send them: sampled at temperature 1 until a stop string, with the sampler's logprobs.

    Advantages are drawn, the same for the same completion: running programs is not what is measured here.
    """
    if bf16:
        model.to(torch.bfloat16)  # pyright: ignore[reportCallIssue, reportArgumentType]
    rng = np.random.default_rng(SEED)
    texts = [str(tokenizer.decode([i])) for i in range(len(tokenizer))]
    ends_by = eos_ids(model.generation_config, tokenizer)
    groups = []
    for task in tasks:
        torch.manual_seed(SEED)
        prompt = torch.tensor([tokenizer.encode(task.prompt)])
        width = task.max_new_tokens or 24
        generate: Any = model.generate
        out = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=SAMPLES,
            max_new_tokens=width,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id,
        )
        tokens = out.sequences[:, prompt.shape[1] :]
        table = torch.log_softmax(torch.stack(out.logits, dim=1).float(), -1)
        logprobs = table.gather(-1, tokens[..., None])[..., 0].numpy()
        ends = [i for i, text in enumerate(texts) if any(stop in text for stop in task.stop)]
        ended = np.isin(tokens.numpy(), [*ends, *ends_by])
        lengths = np.where(ended.any(1), ended.argmax(1) + 1, tokens.shape[1]).astype(np.int32)
        advantages: dict[bytes, tuple[float, int]] = {}
        for i, (row, length) in enumerate(zip(tokens.numpy(), lengths, strict=True)):
            first = advantages.setdefault(row[:length].tobytes(), (float(rng.normal()), i))[1]
            logprobs[i] = logprobs[first]  # of equal rows equal, so that merging them changes nothing
        groups.append(
            GroupRows(
                prompt_ids=prompt[0].numpy().astype(np.int32),
                tokens=tokens.numpy().astype(np.int32),
                behaviour_logprobs=logprobs.astype(np.float32),
                versions=np.zeros(tokens.shape, np.int32),
                lengths=lengths,
                advantages=np.array(
                    [advantages[row[:n].tobytes()][0] for row, n in zip(tokens.numpy(), lengths, strict=True)],
                    np.float32,
                ),
            )
        )
    return groups


def nothing_shared(group: GroupRows, vocabulary: int, seed: int) -> GroupRows:
    """Prompt and lengths of the group with random completions, each beginning with another token: nothing to merge."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, group.tokens.shape).astype(np.int32)
    tokens[:, 0] = rng.choice(vocabulary, len(tokens), replace=False)
    return replace(group, tokens=tokens, advantages=rng.normal(size=len(tokens)).astype(np.float32))


def describe(groups: Sequence[GroupRows], apart: Sequence[GroupRows]) -> dict[str, Any]:
    batch, other = (TrainBatch.build(list(g), 1 << 20) for g in (groups, apart))
    lengths = np.concatenate([g.lengths for g in groups])
    return {
        "samples": f"{len(groups)} x {SAMPLES}",
        "merged_rows": batch.merged_rows,
        "completion_tokens_mean": round(float(lengths.mean()), 1),
        "prompt_tokens_mean": round(float(np.mean([g.prompt_ids.size for g in groups])), 1),
        "tokens": {
            "one row per sample": int(lengths.sum() + SAMPLES * sum(g.prompt_ids.size for g in groups)),
            "ours": batch.packed_tokens,
            "ours, nothing shared": other.packed_tokens,
        },
    }


def denominators(groups: Sequence[GroupRows]) -> Denominators:
    return Denominators(float(sum(g.lengths.sum() for g in groups)), float(sum(len(g.lengths) for g in groups)))


# ---- the two sides


class Ours:
    """The trainer's own step, packing included."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.policy.optimizer

    def gradient(self) -> Gradient:
        return _copied(self.policy.model)

    def step(self, groups: Sequence[GroupRows], bf16: bool) -> float:
        self.policy.config = replace(self.policy.config, autocast_bf16=bf16)
        batch = TrainBatch.build(list(groups), self.policy.config.micro_batch_tokens)
        totals = denominators(groups)

        def loss_fn(x: LossInputs) -> LossResult:
            return policy_loss(
                x.logprobs,
                x.behaviour_logprobs,
                None,
                None,
                x.advantages,
                x.loss_mask,
                LOSS,
                CORRECTION,
                totals,
                row_weights=x.row_weights,
            )

        return self.policy.train_step(batch, loss_fn).metrics.loss


class RowPerSample:
    """Every completion with its prompt as a row of its own, padded to the longest of its pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        model.set_attn_implementation("sdpa")
        model.requires_grad_(True)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0, fused=True
        )

    def gradient(self) -> Gradient:
        return _copied(self.model)

    def step(self, groups: Sequence[GroupRows], bf16: bool, rows: int) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        totals, loss = denominators(groups), 0.0
        for group in groups:
            order = np.argsort(group.lengths)  # rows of a pass are of similar length
            for start in range(0, len(order), rows):
                part = self.loss(group, order[start : start + rows], bf16, totals)
                part.backward()
                loss += part.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def loss(self, group: GroupRows, chosen: np.ndarray, bf16: bool, totals: Denominators) -> torch.Tensor:
        prompt, width = group.prompt_ids.size, int(group.lengths[chosen].max())
        completions = torch.from_numpy(group.tokens[chosen, :width]).long()
        ids = torch.cat([torch.from_numpy(group.prompt_ids).long().expand(len(chosen), -1), completions], dim=1)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            logits = self.model(ids, use_cache=False, logits_to_keep=width + 1 if bf16 else 0).logits
        logits = logits[:, :-1] if bf16 else logits[:, prompt - 1 : -1]
        logprobs = -torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), completions.flatten(), reduction="none"
        )
        mask = torch.arange(width) < torch.from_numpy(group.lengths[chosen])[:, None]
        return policy_loss(
            logprobs.view(mask.shape),
            torch.from_numpy(group.behaviour_logprobs[chosen, :width]),
            None,
            None,
            torch.from_numpy(group.advantages[chosen]),
            mask,
            LOSS,
            CORRECTION,
            totals,
        ).loss


def _copied(model: PreTrainedModel) -> Gradient:
    return [p.grad.clone() for _, p in sorted(model.named_parameters()) if p.grad is not None]


def best_rows(peer: RowPerSample, groups: Sequence[GroupRows], bf16: bool) -> int:
    """How many rows a pass of this peer should have, by one group's time."""
    spans = {rows: timed(partial(peer.step, groups[:1], bf16, rows)) for rows in (ROWS_PER_PASS[0], *ROWS_PER_PASS)}
    note(
        f"  one row per sample, {'bf16' if bf16 else 'fp32'}, rows per pass: { {r: round(s.cpu, 2) for r, s in spans.items()} }"
    )
    return min(spans, key=lambda rows: spans[rows].cpu)


# ---- the same loss, the same gradient


@contextmanager
def caught(side: Ours | RowPerSample) -> Iterator[Caught]:
    """The gradient that the optimizer is given."""
    found = Caught()

    def keep(*_: object) -> None:
        found.gradient = side.gradient()

    handle = side.optimizer.register_step_pre_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def check_agreement(ours: Ours, peer: RowPerSample, groups: Sequence[GroupRows]) -> dict[str, float]:
    """float32: loss, of its terms' mean size, and gradient, of its norm; cutting its rows into other passes changes
    the peer's own gradient by a fifth of the bound (SmolLM2). bfloat16: cosine of each side's gradient with the float32 one.

    Raises UnfairComparison when the sides differ by more than rounding.
    """
    results: dict[tuple[str, bool], Caught] = {}
    for bf16 in (False, True):
        with caught(ours) as found:
            found.loss = ours.step(groups, bf16)
        results["ours", bf16] = found
        with caught(peer) as found:
            found.loss = peer.step(groups, bf16, ROWS_PER_PASS[-1])
        results["peer", bf16] = found
    a, b = results["ours", False], results["peer", False]
    assert a.gradient is not None
    assert b.gradient is not None
    difference = torch.stack([(x - y).norm() for x, y in zip(a.gradient, b.gradient, strict=True)]).norm()
    figures = {
        "fp32_loss_difference": abs(a.loss - b.loss) / loss_scale(groups),
        "fp32_gradient_difference": float(difference / _norm(b.gradient)),
        "bf16_gradient_cosine_ours": _cosine(results["ours", True].gradient, b.gradient),
        "bf16_gradient_cosine_peer": _cosine(results["peer", True].gradient, b.gradient),
    }
    cosine = min(figures["bf16_gradient_cosine_ours"], figures["bf16_gradient_cosine_peer"])
    if (
        figures["fp32_loss_difference"] > LOSS_AGREES
        or figures["fp32_gradient_difference"] > GRADIENT_AGREES
        or cosine < BF16_AGREES
    ):
        raise UnfairComparison(f"the sides do not train the same: {figures}")
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def loss_scale(groups: Sequence[GroupRows]) -> float:
    """Mean over the tokens of |advantage|: terms of both signs cancel in the loss, their rounding does not."""
    return sum(float(np.abs(g.advantages) @ g.lengths) for g in groups) / denominators(groups).tokens


def _norm(gradient: Gradient) -> torch.Tensor:
    return torch.stack([x.norm() for x in gradient]).norm()


def _cosine(a: Gradient | None, b: Gradient) -> float:
    assert a is not None
    dot = sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
    return dot / float(_norm(a) * _norm(b))
