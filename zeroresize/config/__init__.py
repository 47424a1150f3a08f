"""What a user may ask of balancing, checked before anything runs."""

from zeroresize.config.balance import BalanceConfig
from zeroresize.config.paper import PaperConfig

__all__ = ["BalanceConfig", "PaperConfig"]
