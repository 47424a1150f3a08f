"""States that go through a file."""

import json

from zeroresize.utils.codec import decoded, encoded


def resumed(state, known=None):
    """What a run goes on from that has saved ``state`` as JSON; ``known`` is what it had made before."""
    return decoded(type(state), json.loads(json.dumps(encoded(state))), "state", state if known is None else known)


def values_of(state):
    """The values of a whole state, to be changed at will."""
    return state["state"][0]


def held_by(state, key):
    """The values that a balancer's state has under a key."""
    return values_of(state[key])
