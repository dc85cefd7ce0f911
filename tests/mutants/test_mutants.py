"""What is changed in a file to see whether tests notice, and what is said of it."""

import json

import pytest

from tests import ROOT
from tests.mutants import __main__ as program
from tests.mutants.mutating import mutants_of

PYTHON = '''
def may(age, limit):
    """Not 1 < 2, as this is no code."""
    if age is not None and age >= limit - 1:  # True
        for one in "1 == 2", f"{age + 3} > 4":
            print(one)
        return not one
    raise ValueError
'''

LUA = """
local age = call('GET', KEYS[1]) -- or 2
if age ~= '3 < 4' and not left then
  call('DEL', KEYS[1])
  left = age + 5
  table.concat({
    6 }, '7')
  return left
end
"""


def changes(file):
    """What is replaced by what in a file."""
    return {(one.old.strip(), one.new.strip()) for one in mutants_of(file)}


def test_of_python_code_each_part_that_decides_something_is_changed(tmp_path):
    file = tmp_path / "may.py"
    file.write_text(PYTHON)
    # Before Python 3.12, an f-string is all text.
    assert changes(file) - {("+", "-"), ("3", "4")} == {
        ("is not", "is"),
        ("and", "or"),
        (">=", ">"),
        ("-", "+"),
        ("1", "2"),
        ("print(one)", "pass"),
        ("return not one", "return None"),
        ("raise ValueError", "pass"),
    }


def test_of_lua_code_too(tmp_path):
    file = tmp_path / "may.lua"
    file.write_text(LUA)
    assert changes(file) == {
        ("1", "2"),
        ("5", "6"),
        ("6", "7"),
        ("~=", "=="),
        ("and", "or"),
        ("not", ""),
        ("+", "-"),
        ("call('DEL', KEYS[1])", ""),
        ("left = age + 5", ""),
        ("left", "false"),
    }


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """One that has a rule, and a test of half of it."""
    rules = tmp_path / "shop" / "rules"
    rules.mkdir(parents=True)
    (rules / "ages.py").write_text("OLD = 64\n\n\ndef is_old(age):\n    return age > OLD\n")
    (tmp_path / "test_ages.py").write_text(
        "from shop.rules.ages import is_old\n\n\n"
        "def test_it():\n    assert is_old(65)\n    assert not is_old(63)\n"
    )
    (tmp_path / "survivors.toml").write_text("survivor = []")
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "PACKAGE", tmp_path / "shop")
    monkeypatch.setattr(program, "RESULTS", tmp_path / ".mutants.jsonl")
    monkeypatch.setattr(program, "EXPLAINED", tmp_path / "survivors.toml")
    tests = ("-p", "no:django", "-p", "no:django_redislock", "test_ages.py")
    monkeypatch.setattr(
        program, "ROOMS", {"rules/*.py": (program.Tests(tests), program.Tests(tests, 2))}
    )
    monkeypatch.setattr("sys.argv", ["mutants"])
    return tmp_path


def run(capsys):
    """With what the program exits, and what it has printed."""
    with pytest.raises(SystemExit) as ended:
        program.main()
    return ended.value.code, capsys.readouterr().out


def test_a_survivor_is_an_error_until_it_is_explained(repository, capsys):
    code, printed = run(capsys)
    assert "return age >= OLD" in str(code)
    outcomes = [line.split() for line in printed.splitlines() if "rules/ages.py:" in line]
    assert [(how, where) for how, *_, where in outcomes] == [
        ("killed", "rules/ages.py:1"),  # At import.
        ("killed", "rules/ages.py:5"),
        ("SURVIVED", "rules/ages.py:5"),
    ]
    assert printed.splitlines()[-1].split() == ["2", "0", "1", "0", "rules/*"]

    survivor = {
        "path": "rules/ages.py",
        "was": "return age > OLD",
        "becomes": "return age >= OLD",
        "why": "Nobody is 64.",
    }
    told = "".join(f"{name} = {json.dumps(value)}\n" for name, value in survivor.items())
    (repository / "survivors.toml").write_text(f"[[survivor]]\n{told}")
    code, printed = run(capsys)
    assert code == 0
    assert "SURVIVED" not in printed  # It was tried before.
    assert printed.splitlines()[-1].split() == ["2", "1", "0", "0", "rules/*"]


def test_tests_that_fail_anyway_prove_nothing(repository, capsys):
    (repository / "test_ages.py").write_text("def test_it():\n    assert False\n")
    code, _ = run(capsys)
    assert "fail without any mutant" in str(code)


def test_each_survivor_that_is_explained_is_a_mutant():
    explained = program.explanations()
    paths = [json.loads(key)[0] for key in explained]
    mutants = {case.key for case in program.cases_of(paths or ["-"])}
    assert [key for key in explained if key not in mutants] == []
    assert all(explained.values())


def test_each_file_that_a_room_names_is_there():
    """Else the tests of the room fail without any mutant, and it cannot be tried."""
    named = {
        argument
        for runs in program.ROOMS.values()
        for one in runs
        for argument in one.arguments
        if argument.startswith("tests/")
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert [room for room in program.ROOMS if not any(program.PACKAGE.glob(room))] == []
