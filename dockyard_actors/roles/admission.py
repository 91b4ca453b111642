"""Which prompt comes next, and whether the staleness budget has room for it.

Pure functions of the ledger and the configuration; the controller journals what they decide.
"""

from __future__ import annotations

from dockyard_actors.config import Config
from dockyard_actors.roles.ledger import QUARANTINED, Closed, Event, Handed, Issued, Lease, Ledger
from dockyard_actors.tasks.dataset import TaskSet
from dockyard_actors.tasks.seeds import epoch_order


class NoPrompts(RuntimeError):
    """Every training prompt is quarantined: nothing is left to learn from."""


def lag(ledger: Ledger) -> int | None:
    """Steps that the engines are behind the trainer; None when nobody knows what they hold."""
    return ledger.step - ledger.fresh_step if ledger.fresh_step >= 0 else None


def is_open(ledger: Ledger, config: Config) -> bool:
    """Whether work may be handed out: what the engines would generate now can still be trained. In sync mode only with fresh engines."""
    behind = lag(ledger)
    return behind is not None and behind <= config.max_age and not ledger.stopping and not ledger.finished


def room(ledger: Ledger, config: Config) -> int:
    """New groups that may be issued now: (max_age + 1 − lag)·B − (in flight, buffered, taken but not stepped), and never more than the
    rest of the run needs. A group of engines that lag behind is older by as much when its turn comes."""
    batch = config.grpo.num_prompts_per_step
    needed = (config.grpo.max_num_steps - ledger.step) * batch
    return max(0, min((config.max_age + 1 - (lag(ledger) or 0)) * batch, needed) - len(ledger.open))


def hand_out(lease: Lease, holder: str, max_attempts: int) -> Event:
    """A lease that lost its holder goes to another one, or is quarantined after too many holders died with it."""
    attempt = lease.attempt + (1 if lease.cause == "holder_died" else 0)
    if attempt > max_attempts:
        return Closed(lease.id, "failed", f"{QUARANTINED}: {max_attempts} rollouts died holding it")
    return Handed(lease.id, holder, attempt)


class PromptOrder:
    """The endless order of training prompts: every epoch is its own seeded shuffle."""

    def __init__(self, tasks: TaskSet, seed: int):
        self._ids = [task.id for task in tasks.train]
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def at(self, draw: int) -> tuple[str, int]:
        """Returns (prompt id, epoch) at position `draw`."""
        epoch, position = divmod(draw, len(self._ids))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(epoch_order(self._seed, epoch, len(self._ids)))
        return self._ids[self._order[position]], epoch

    def issue(self, ledger: Ledger, holder: str) -> Issued:
        """The next new lease: a failed prompt's second try first, else the next prompt that is not quarantined. Raises NoPrompts."""
        if ledger.retries:
            failed = ledger.leases[ledger.retries[0]]
            return Issued(
                ledger.next_lease(),
                failed.prompt,
                failed.epoch,
                failed.attempt + 1,
                holder,
                ledger.draws - 1,
                failed.id,
            )
        for draw in range(ledger.draws, ledger.draws + len(self._ids) + 1):
            prompt, epoch = self.at(draw)
            if prompt not in ledger.quarantined:
                return Issued(ledger.next_lease(), prompt, epoch, 1, holder, draw)
        raise NoPrompts(
            f"all {len(self._ids)} training prompts are quarantined; summary.json counts the causes (failed_by_cause) and the rollouts' logs name each prompt"
        )
