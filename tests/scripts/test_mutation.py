"""Faults that scripts.mutation plants: the same by a seed, one change each, and only where tests can see them."""

import ast

import pytest

from scripts.mutation.__main__ import instrumented
from scripts.mutation.faults import chosen_faults, faults_of, planted

SOURCE = '''
def mean(values, weight=1):
    """Not a statement."""
    total = 0.5
    if not values and weight > 2:
        raise ValueError(f"{1 + 1}")
    elif len(values) == 3:
        log(total, weight)
    return sum(values) / len(values)
'''


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "package" / "mean.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def test_each_fault_is_one_change_of_an_executable_line(path):
    faults = [fault for fault, _, _ in faults_of(path)]
    kinds = {fault["fault"] for fault in faults}
    assert kinds >= {"And is Or", "Gt is GtE", "Eq is NotEq", "Div is Mult", "2 is 3", "2 is 1", "0.5 is 1.5"}
    assert kinds >= {"statement removed", "condition negated", "first two arguments swapped"}
    assert {int(fault["line"]) for fault in faults} == {4, 5, 7, 8, 9}
    for fault in faults:
        changed = planted(fault).splitlines()
        different = [at for at, line in enumerate(SOURCE.splitlines()) if changed[at] != line]
        assert different == [int(fault["line"]) - 1] and ast.parse("\n".join(changed))


def test_a_seed_chooses_the_same_faults_again_on_lines_of_their_own(path):
    roots = [str(path.parent)]
    chosen = [chosen_faults(roots, 4, seed) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2] and len({fault["line"] for fault in chosen[0]}) == 4


def test_a_fault_that_is_not_there_any_more_is_refused(path):
    fault, *_ = next(faults_of(path))
    path.write_text(SOURCE.replace("0.5", "0.25"))
    with pytest.raises(ValueError, match=r"mean\.py:4: 'total = 0\.5' is not there: list the faults again"):
        planted(fault)


def test_statements_with_faults_say_that_they_run_and_nothing_else_changes(path):
    lines = instrumented(path, {7: [0], 8: [1, 2]}).splitlines()
    said = [line.strip() for line in lines if "hit(" in line]
    assert [line[-2] for line in said] == ["0", "1", "2"]
    others = "\n".join(line for line in lines if "hit(" not in line)
    assert ast.dump(ast.parse(others)) == ast.dump(ast.parse(SOURCE))
