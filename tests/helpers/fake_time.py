"""Time that passes only when told, for what would sleep."""


class FakeTime:
    """A clock that only moves when told, and a sleep that ends late."""

    def __init__(self, overshoot_s=0.0):
        self.now_s = 0.0
        self.overshoot_s = overshoot_s
        self.sleeps = []

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now_s += seconds + self.overshoot_s
