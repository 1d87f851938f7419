"""The tool that changes the source and sees whether tests notice (tests/mutants.py, which says how it is run)."""

from collections import Counter
from pathlib import Path

from support.meant import MEANT
from support.mutations import mutants

ROOT = Path(__file__).parents[1]
SOURCE = '''
def worth(values: list[float], limit: int = 3) -> float:
    """Return 1 of 2."""
    if not values or len(values) > limit:
        raise ValueError(f"{len(values)} > 3")
    return sum(v for v in values if v) * 0.5
'''


def test_each_place_of_a_function_is_changed_in_all_ways_and_messages_in_none() -> None:
    found = {mutant.id.removeprefix("a.py:worth:"): (mutant.before, mutant.after) for mutant in mutants("a.py", SOURCE)}
    condition, half, values = "not values or len(values) > limit", "sum(v for v in values if v) * 0.5", "len(values)"
    assert found == {
        "none:0": (half, "None"),
        "negative:0": (half, f"-({half.replace('(v', '((v').replace('v)', 'v))')})"),
        "if:0": (condition, "True"),
        "if:1": (condition, "False"),
        "and-or:0": (condition, "not values and len(values) > limit"),
        "operand:0": (condition, "len(values) > limit"),
        "operand:1": (condition, "not values"),
        "not:0": ("not values", "values"),
        "compare:0": ("len(values) > limit", "len(values) >= limit"),
        "call:0": (values, "values"),
        "statement:0": ('raise ValueError(f"{len(values)} > 3")', "pass"),
        "arithmetic:0": (half, "sum((v for v in values if v)) / 0.5"),
        "call:1": ("sum(v for v in values if v)", "(v for v in values if v)"),
        "filter:0": ("(v for v in values if v)", "(v for v in values)"),
        "plus-one:0": ("0.5", "1.5"),
        "zero:0": ("0.5", "0.0"),
        "negated:0": ("0.5", "-0.5"),
    } | {f"a.py::{name}:0": ("3", after) for name, after in (("plus-one", "4"), ("zero", "0"), ("negated", "-3"))}


def test_a_mutant_is_the_whole_file_with_one_change_and_called_the_same_wherever_its_lines_move() -> None:
    below = mutants("a.py", f"import os\n\n{SOURCE}")
    assert [mutant.id for mutant in mutants("a.py", SOURCE)] == [mutant.id for mutant in below]
    assert [mutant.source for mutant in below if mutant.id == "a.py:worth:compare:0"] == [
        f"import os\n\n{SOURCE.replace('len(values) > limit:', 'len(values) >= limit:')}"
    ]


def test_some_mutants_are_of_all_kinds_alike_and_the_seed_decides_which() -> None:
    source = "a = 1 + 2 + 3\nb = a < 4 < 5 < 6"  # 6 times each change of a number, 3 of a comparison, 2 of a sum
    some = [[mutant.id for mutant in mutants("a.py", source, 10, seed)] for seed in (0, 0, 1)]
    assert Counter(name.split(":")[2] for name in some[0]) == dict.fromkeys(
        ("arithmetic", "compare", "negated", "plus-one", "zero"), 2
    )
    assert some[0] == some[1] != some[2]


def test_names_of_functions_are_those_of_their_code() -> None:
    source = "class A:\n    def b(self):\n        def c():\n            return lambda: 1 + d\n        return c()\n"
    names = {mutant.function for mutant in mutants("a.py", source)}
    assert names == {"A.b.<locals>.c.<locals>.<lambda>", "A.b.<locals>.c", "A.b"}


def test_what_a_meant_mutant_changes_stands_once_in_its_file() -> None:
    package = Path(ROOT, "src/hocket")
    rows = [row for row in MEANT if (package / "extras").exists() or not row.path.startswith("extras/")]
    texts = {row.path: (package / row.path).read_text(encoding="utf-8") for row in rows}
    assert [(row.path, row.name) for row in rows if texts[row.path].count(row.before) != 1] == []
