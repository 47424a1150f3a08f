"""A step timer whose time passes only when a test says so."""

import pytest
from helpers.virtual_training import FakeClock

from zeroresize.measure.step_timer import StepTimer


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def timer(clock):
    timer = StepTimer(clock)
    yield timer
    timer.close()
