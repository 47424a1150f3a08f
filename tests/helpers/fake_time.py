"""Time that passes only when told: for what would sleep, and for what reads a clock."""


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


class FakeClock:
    """Time that stands still but for ``advance``; marks pass when the test says so, as device events do."""

    def __init__(self):
        self.now = 0.0
        self.passed = float("inf")
        self.on_main_stream = True
        self.recycled = []

    def advance(self, seconds):
        self.now += seconds

    def mark(self):
        return self.now

    def seconds(self, begin, end):
        return end - begin

    def has_passed(self, mark):
        return mark <= self.passed

    def enter_main_stream(self):
        pass

    def is_on_main_stream(self):
        return self.on_main_stream

    def recycle(self, marks):
        self.recycled += marks
