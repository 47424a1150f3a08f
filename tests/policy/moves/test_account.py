"""What balancing has lost against off."""

from zeroresize.policy.moves.account import Account


def test_gains_of_long_ago_are_no_licence_to_lose():
    account = Account()
    account.take(-1e3, 1e4, 10**4)
    account.take(900.0, 1e3, 10**3)
    assert account.debt_s == 0.0
    for _ in range(100):
        account.take(0.0, 1e3, 10**3)
    account.take(900.0, 1e3, 10**3)
    assert account.debt_s > 500.0
