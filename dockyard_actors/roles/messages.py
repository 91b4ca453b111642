"""The wire contract between roles: who may ask whom for what. Tensors never travel here; a TensorRef is as close as they come.

Message names are imperative, replies are what was done. A message class names its reply type; `retry`-able ones (see each docstring)
have the same effect however often they arrive.
"""

from __future__ import annotations

import msgspec

from dockyard_actors.observe.metrics import EvalRecord, StepRecord
from dockyard_actors.observe.rollouts import RolloutSample
from dockyard_actors.observe.summary import PassRates
from dockyard_actors.observe.trace import Span
from dockyard_actors.roles.ledger import GroupMeta
from dockyard_actors.runtime.message import Message
from dockyard_actors.sandbox.types import Verdict
from dockyard_actors.transport.tensors import TensorRef
from dockyard_actors.transport.weights_lines import Meeting
from dockyard_actors.transport.weights_shm import WeightManifest, WeightRef


class Done(msgspec.Struct, frozen=True, tag=True):
    """Nothing to report."""


# ---- rollout → controller


class Granted(msgspec.Struct, frozen=True, tag=True):
    """One prompt to work on."""

    lease: int
    prompt: str
    epoch: int
    attempt: int


class Grants(msgspec.Struct, frozen=True, tag=True):
    """Leases granted now; empty when the staleness budget had none before `wait_s` passed."""

    leases: tuple[Granted, ...]


class LeasePrompts(Message[Grants], frozen=True, tag=True):
    """A rollout asks for up to `capacity` groups, waiting at most `wait_s` seconds for the staleness budget."""

    rollout: str
    incarnation: int
    capacity: int
    wait_s: float
    working: tuple[int, ...] = ()  # leases it still works on: another one that it holds was granted in a lost reply


class LeaseIs(msgspec.Struct, frozen=True, tag=True):
    """`owned` True: the lease stays open, the buffer has its group; what a rollout says of it comes too late."""

    owned: bool


class CloseLease(Message[LeaseIs], frozen=True, tag=True):
    """A rollout or the buffer ends a lease. Retryable: a lease that is closed already stays as it is."""

    lease: int
    outcome: str  # expired | filtered | failed
    cause: str
    retry_prompt: bool = False  # issue the prompt once more (a new lease)
    never_again: bool = False  # quarantine the prompt: it can never be worked on


class ReportSamples(Message[Done], frozen=True, tag=True):
    """Readable completions for rollouts/; how many of a step are kept is the controller's to say."""

    samples: tuple[RolloutSample, ...]


# ---- buffer → controller


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """`owned` False: the lease is closed or held by someone else; the group is not wanted."""

    owned: bool
    why: str = ""


class AcceptGroup(Message[Accepted], frozen=True, tag=True):
    """The buffer asks the journal to own a group before it acknowledges the push. Retryable."""

    meta: GroupMeta
    ref: TensorRef


class OpenGroup(msgspec.Struct, frozen=True):
    meta: GroupMeta
    ref: TensorRef


class OpenGroups(msgspec.Struct, frozen=True, tag=True):
    """Every buffered group that is still open, as the journal has it."""

    groups: tuple[OpenGroup, ...]


class ReconcileBuffer(Message[OpenGroups], frozen=True, tag=True):
    """A buffer that starts, or whose trainer died, compares what it holds with the journal."""

    held: tuple[int, ...]


# ---- trainer → controller


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Where the run stands."""

    step: int
    newest_version: int
    rolled_back: int


class TrainerStarts(Message[Welcome], frozen=True, tag=True):
    """A trainer has loaded the checkpoint of `step`: later steps are rolled back, their leases go back in flight. Retryable."""

    step: int


class VersionIs(msgspec.Struct, frozen=True, tag=True):
    version: int


class NextVersion(Message[VersionIs], frozen=True, tag=True):
    """The next weight version: journalled, never repeated. Retryable: one that was given out beyond `above` is given again."""

    above: int  # the newest version that the trainer knows of


class EnginesFresh(Message[Done], frozen=True, tag=True):
    """Every engine holds `version`, the weights after `step`: admission counts from there. Retryable."""

    version: int
    step: int


class StepAck(msgspec.Struct, frozen=True, tag=True):
    stop: bool  # somebody asked the run to stop: checkpoint and end


class StepDone(Message[StepAck], frozen=True, tag=True):
    """One optimizer step; the engines lag one more behind until EnginesFresh. Retryable: a step counts once."""

    step: int
    version: int  # weights that were trained from
    trained: tuple[int, ...]
    filtered: tuple[tuple[int, str], ...]  # (lease, cause)


HOST_LOST = "host_lost"  # cause of such leases


class LoseGroups(Message[Done], frozen=True, tag=True):
    """The trainer could not have the tensors of these groups: the host that held them is lost. They end as failed(host_lost), and
    their prompts are issued anew. Retryable: what is closed already stays as it is."""

    leases: tuple[int, ...]
    why: str


class ReportStep(Message[Done], frozen=True, tag=True):
    record: StepRecord


class CheckpointDone(Message[Done], frozen=True, tag=True):
    step: int


class ReportEval(Message[Done], frozen=True, tag=True):
    record: EvalRecord


class ReportExamples(Message[Done], frozen=True, tag=True):
    """Completions of the final evaluation, shown at the end of the run."""

    samples: tuple[RolloutSample, ...]


class Warn(Message[Done], frozen=True, tag=True):
    """Something a person should know when the run ends."""

    text: str


class RunFinished(Message[Done], frozen=True, tag=True):
    status: str  # completed | interrupted


# ---- anyone → controller


class ReportRole(Message[Done], frozen=True, tag=True):
    """What a role does and waits for, once a second."""

    role: str
    doing: str
    waits_for: str = ""
    wait_s: float = 0.0
    incarnation: int = 0
    counters: dict[str, float] = msgspec.field(default_factory=dict)  # since this incarnation started
    facts: dict[str, str] = msgspec.field(default_factory=dict)  # such as isolation, engine


class ReportSpans(Message[Done], frozen=True, tag=True):
    """What a role did since it told last, for trace.json. Retryable: the reader of a trace knows a span that was told twice."""

    role: str
    incarnation: int
    spans: tuple[Span, ...]


class StatusIs(msgspec.Struct, frozen=True, tag=True):
    """All that the live view and the end of the run need."""

    phase: str
    step: int
    version: int
    ledger: dict[str, int]
    buffered: int
    causes: dict[str, dict[str, int]]
    last_step: StepRecord | None
    pass_rates: PassRates  # (before, newest)
    roles: dict[str, ReportRole]
    warnings: tuple[str, ...]
    tokens_generated: int
    finished: str  # "" while it runs, else completed | interrupted
    failure: str  # why the run cannot go on although every process lives; "" when it can
    examples: tuple[RolloutSample, ...]


class AskStatus(Message[StatusIs], frozen=True, tag=True):
    pass


class StopRun(Message[Done], frozen=True, tag=True):
    """Stop admitting; the trainer ends its step, checkpoints and finishes with status interrupted."""

    reason: str


class ReportPhase(Message[Done], frozen=True, tag=True):
    """The trainer names what the run is doing now: warm-up, evaluation, training."""

    phase: str


# ---- controller → trainer


class StopTraining(Message[Done], frozen=True, tag=True):
    """End the step under way, checkpoint, and finish as interrupted. Retryable."""

    reason: str


# ---- rollout → buffer, trainer → buffer, controller → buffer


class Pushed(msgspec.Struct, frozen=True, tag=True):
    owned: bool
    why: str = ""


class PushGroup(Message[Pushed], frozen=True, tag=True):
    """A finished group. Acknowledged means owned. Retryable: the lease id makes a repeated push harmless."""

    meta: GroupMeta
    ref: TensorRef


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Groups for one step; empty when there were not enough before `wait_s` passed."""

    groups: tuple[OpenGroup, ...]
    ready: int  # groups that wait in the buffer, for the message that says who waits for what


class TakeGroups(Message[Batch], frozen=True, tag=True):
    """The trainer takes `count` groups no older than `max_age` at `version`, oldest first; too old ones are expired and counted."""

    count: int
    version: int
    max_age: int
    wait_s: float
    incarnation: int = 1  # of the trainer: the question of a dead one is not answered
    # Leases that it took and has not stepped, and those of its last steps: a restarted buffer does not know who has them, and may not have
    # heard of the steps yet.
    holding: tuple[int, ...] = ()


class ReleaseGroups(Message[Done], frozen=True, tag=True):
    """The leases are closed: free their blocks. Retryable."""

    leases: tuple[int, ...]


# ---- rollout → broker


class Program(msgspec.Struct, frozen=True):
    request_id: str
    source: str
    tests: tuple[str, ...]
    hidden_tests: tuple[str, ...]


class Scored(msgspec.Struct, frozen=True, tag=True):
    """One verdict a program, in order."""

    verdicts: tuple[Verdict, ...]


class ScorePrograms(Message[Scored], frozen=True, tag=True):
    """Retryable: the executor answers a repeated request id from what it knows."""

    programs: tuple[Program, ...]
    deadline_s: float


# ---- trainer → rollout


class Canary(msgspec.Struct, frozen=True):
    """One fixed sequence as the trainer scores it with the weights that are sent: what an engine must find as well.

    ids: (T,) int32 and logprobs: (T-1,) float32 of ids[1:], both as little-endian bytes; temperature: of the logprobs.
    """

    ids: bytes
    logprobs: bytes
    temperature: float


class Invitation(msgspec.Struct, frozen=True, tag=True):
    """Weights that the trainer sends to everybody who meets it there: one engine's part in it."""

    version: int
    manifest: WeightManifest
    meeting: Meeting


Offer = WeightRef | Invitation  # where the weights are in shared memory, or where they are going to be sent


class Applied(msgspec.Struct, frozen=True, tag=True):
    """The engine holds these weights. `digest` is xxh3 over the checksums of the bytes it read, entry by entry; `mismatch` the mean
    |Δ| of the canary's logprobs in nats, -1 without a canary; `paused_s` how long decoding stood still."""

    version: int
    digest: int
    mismatch: float = -1.0
    paused_s: float = 0.0


class UpdateWeights(Message[Applied], frozen=True, tag=True):
    """Swap to these weights between two decode steps and prove it before generating on. Retryable, but for an invitation."""

    offer: Offer
    canary: Canary | None = None


class Memory(msgspec.Struct, frozen=True, tag=True):
    """Bytes that the process held before and after (`runtime/memory.py`)."""

    before: int
    after: int


class Sleep(Message[Memory], frozen=True, tag=True):
    """Colocated: give the engine's memory back, the trainer wants the device. Groups that run stop where they are and go on when weights
    have come. Retryable."""


class PrepareForGeneration(Message[Memory], frozen=True, tag=True):
    """Colocated: the trainer left the device, take the memory back; weights come next. Retryable."""


class TaskResult(msgspec.Struct, frozen=True):
    prompt_id: str
    passed: int
    samples: int


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    version: int
    results: tuple[TaskResult, ...]
    examples: tuple[RolloutSample, ...]
    masked: int  # samples without a verdict (infra)


class Evaluate(Message[Evaluated], frozen=True, tag=True):
    """Pass rates of tasks at the engine's present weights. Retryable (computed anew)."""

    prompts: tuple[str, ...]
    samples: int
    greedy: bool
    seed: int
    version: int  # weights to evaluate; refused when the engine holds others
    step: int
    examples: int = 0


# ---- rollout → trainer


class Weights(msgspec.Struct, frozen=True, tag=True):
    offer: Offer
    canary: Canary | None = None


class NoWeights(msgspec.Struct, frozen=True, tag=True):
    """Nothing was published yet, or nothing can be had right now: the next version is delivered to whoever asked."""


class CurrentWeights(Message[Weights | NoWeights], frozen=True, tag=True):
    """A rollout that starts or was restarted pulls the newest weights. Retryable."""

    rollout: str


# ---- a joining agent or a person → the primary agent


class RunIs(msgspec.Struct, frozen=True, tag=True):
    """What a process needs to take part in the run."""

    run_id: str
    run_dir: str
    session: str
    config: str  # resolved, YAML
    fd_path: str  # unix socket of the server that holds the arenas of that host
    host_id: str


class AskRun(Message[RunIs], frozen=True, tag=True):
    pass
