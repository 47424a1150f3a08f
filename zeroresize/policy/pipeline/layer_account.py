"""What moves of layers have lost and gained against the boundaries that there were at first.

By how much longer steps are than with these is what each profile says of both divisions, for the steps that it stands
for: in the mean that is what they took, whatever has changed between two profiles. ``S`` stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroresize.policy.moves.account import Account

#: After so many moves in a row that have lost, the account makes the next one dearer. A first loss may be that of a
#: wrong guess, such as of a device for the work: it must be possible to mend it.
_LOSSES = 2


@dataclass
class LayerAccount:
    """Add up, profile by profile and move by move, what balancing has lost.

    Attributes:
        home: [S + 1], the first boundaries; None before the first profile.
        account: of all losses and gains.
        is_reversed: whether a change of work has left layers where they are worse than at home.
        lost_s: by how many seconds a step is longer now than at home; negative where it is shorter.
    """

    home: tuple[int, ...] | None = None
    account: Account = field(default_factory=Account)
    is_reversed: bool = field(default=False, init=False)
    lost_s: float = field(default=0.0, init=False)
    _step_s: float = field(default=0.0, init=False)
    _accounted: int | None = field(default=None, init=False)  # steps
    _expects_other_work: bool = field(default=False, init=False)
    #: Lost since the last move: with what that took, and never below 0.
    _net_s: float = field(default=0.0, init=False)
    _away_s: float = field(default=0.0, init=False)
    _num_losses: int = field(default=0, init=False)

    def keep(self, boundaries: tuple[int, ...], step_s: float, home_s: float, num_steps: int) -> None:
        """Take a profile made under these boundaries.

        Args:
            step_s, home_s: seconds of a step as it is, and at home.
            num_steps: how many are over.
        """
        self.lost_s, self._step_s = step_s - home_s, step_s
        if self._expects_other_work and boundaries != self.home:
            self.is_reversed = self.lost_s > 0.0
        self._expects_other_work = False
        self._take(num_steps)

    @property
    def num_steps(self) -> int:
        """Return up to which step the account is taken."""
        return self._accounted or 0

    def expect_other_work(self, num_steps: int | None) -> None:
        """Take the steps that are over, as the next ones have other work; None where nobody counts them."""
        if num_steps is not None:
            self._take(num_steps)
        self._expects_other_work = True

    def move(self, boundaries: tuple[int, ...], saving_s: float, step_s: float, num_steps: int | None) -> None:
        """Expect layers to leave these boundaries for others behind the next step.

        Args:
            saving_s: of a step, from then on.
            step_s: of a step then.
            num_steps: how many are over; None where nobody counts them.
        """
        self._num_losses = self._losses_in_a_row(boundaries)
        self._net_s = self._away_s = 0.0
        if num_steps is not None:
            self._take(num_steps + 1)
        self.lost_s, self._step_s = self.lost_s - saving_s, step_s

    def pay(self, seconds: float) -> None:
        """Take what the move has taken."""
        self.account.take(seconds, seconds, 0)
        self._net_s += seconds

    def trusts(self, boundaries: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Return whether layers may move from these boundaries to the wanted ones for no more than their price."""
        return wanted == self.home or self._losses_in_a_row(boundaries) < _LOSSES

    def mistrust_s(self, boundaries: tuple[int, ...], wanted: tuple[int, ...], price_s: float) -> float:
        """Return the seconds by which this move, of ``price_s`` seconds one way, is dearer."""
        return 0.0 if self.trusts(boundaries, wanted) else self.account.mistrust_s(price_s)

    def calls_home(self, least_s: float) -> bool:
        """Return whether more is lost than may be, and layers have lost ``least_s`` where they are, and still do."""
        return self.account.debt_s > 0.0 and self.lost_s > 0.0 and self._away_s >= least_s

    def _take(self, num_steps: int) -> None:
        passed = 0 if self._accounted is None else max(num_steps - self._accounted, 0)
        self._accounted = num_steps
        lost_s = self.lost_s * passed
        self.account.take(lost_s, self._step_s * passed, passed)
        self._net_s += lost_s
        self._away_s = max(self._away_s + lost_s, 0.0)

    def _losses_in_a_row(self, boundaries: tuple[int, ...]) -> int:
        """How many moves have lost one after the other, the last one by now; to go home is none of them."""
        if boundaries == self.home:
            return self._num_losses
        return self._num_losses + 1 if self._net_s > 0.0 else 0
