"""The section ``balance`` of a YAML document that other programs read, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from zeroresize.config.keys import COMMON_WORDS
from zeroresize.config.paper import ROOM, dotted
from zeroresize.utils.value_checks import closest


def balance_section(document: Any, known: Sequence[str]) -> Any:
    """The section ``balance``, or the whole document where it has none.

    Args:
        known: the keys of the section, those of the room as ``paper.alpha``.

    Raises:
        ValueError: for what would be passed over though it is surely meant for balancing; for a document without the
            section of which no key is one of balancing, or nearly one.
    """
    if not isinstance(document, Mapping):
        return document
    for key, value in document.items():
        if (
            isinstance(key, str)
            and isinstance(value, Mapping | NoneType)
            and key != "balance"
            and closest(key.lower(), ["balance"], 0.8)
        ):
            raise ValueError(f"unknown section '{key}' (did you mean 'balance'?)")
    if "balance" not in document:
        if document and not any(_is_nearly(key, value, known) for key, value in document.items()):
            there_is = ", ".join([*map(str, document)][:6])
            raise ValueError(
                f"no section 'balance', and no key of balancing: there is {there_is}. Write the keys under "
                "'balance:', or alone in a file of their own; {} is an empty section"
            )
        return document
    for key, value in dotted(document).items():
        if isinstance(key, str):
            _require_elsewhere(key, value, known)
    return document["balance"]


def _is_nearly(key: Any, value: Any, known: Sequence[str]) -> bool:
    """Return whether a key of a document without the section is one of the section's keys, or misspelt for one."""
    names = [name.rpartition(".")[2] for name in known]
    return key == ROOM or (not isinstance(value, Mapping) and closest(str(key), names) is not None)


def _require_elsewhere(key: str, value: Any, known: Sequence[str]) -> None:
    """Raise ValueError if ``key``, which stands beside the section, is one of its keys or nearly one."""
    is_others_word = key in COMMON_WORDS and not (isinstance(value, str) and value in COMMON_WORDS[key])
    if is_others_word:
        return
    if key in known:
        raise ValueError(
            f"the balance key '{key}' stands beside the section 'balance', where it has no effect: move it into "
            "the section"
        )
    full_names = {name.removeprefix(f"{ROOM}."): name for name in known} | {name: name for name in known}
    nearest = closest(key, [name for name in full_names if name == key or name not in COMMON_WORDS], 0.92)
    if nearest is not None:
        raise ValueError(
            f"the key '{key}' stands beside the section 'balance': did you mean '{full_names[nearest]}', within the "
            "section?"
        )
