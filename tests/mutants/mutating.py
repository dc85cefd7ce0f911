"""Mutants of a source file: the same text with one thing changed.

The operators are tables of what is replaced by what, for Python and for Lua. They look at the code
only: comments, strings and docstrings are blanked out before.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import NamedTuple

import lupa.lua51

# What both languages write alike.
COMMON = {
    " == ": " {not_equal} ",
    " {not_equal} ": " == ",
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " + ": " - ",
    " - ": " + ",
    " and ": " or ",
    " or ": " and ",
}
PYTHON = {
    **{old.format(not_equal="!="): new.format(not_equal="!=") for old, new in COMMON.items()},
    " is not ": " is ",
    " is ": " is not ",
    " not in ": " in ",
    " in ": " not in ",
    "if not ": "if ",
    "True": "False",
    "False": "True",
    "min(": "max(",
    "max(": "min(",
}
LUA = {
    **{old.format(not_equal="~="): new.format(not_equal="~=") for old, new in COMMON.items()},
    "not ": "",
    "true": "false",
    "false": "true",
    "math.min(": "math.max(",
    "math.max(": "math.min(",
}
# Statements of one line: a call, or a change of a variable; and what is returned.
LUA_STATEMENT = re.compile(r"^ *(?!local\b)([\w.]+\(.*\)|[\w.]+(?:, [\w.]+)* = .*)$", re.MULTILINE)
LUA_ANSWER = re.compile(r"\breturn (?!function\b|false\b|\0)(.+?)(?= end$|$)", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


class Mutant(NamedTuple):
    """One change of one file."""

    line: int
    #: Where it begins in the text, and what stands there.
    at: int
    old: str
    new: str

    def applied_to(self, source):
        assert source.startswith(self.old, self.at)
        return source[: self.at] + self.new + source[self.at + len(self.old) :]


def mutants_of(path):
    """All mutants of a file that can be compiled, in the order of its text."""
    source = path.read_text()
    is_python = path.suffix == ".py"
    found = sorted(set(_of_python(source) if is_python else _of_lua(source)))
    compiles = _is_python if is_python else _is_lua
    return [mutant for mutant in found if compiles(mutant.applied_to(source))]


def _is_python(source):
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _is_lua(source):
    try:
        lupa.lua51.LuaRuntime().compile(source)
    except lupa.lua51.LuaSyntaxError:
        return False
    return True


def _of_python(source):
    tree = ast.parse(source)
    code = _python_code(source)
    for at, old, new in _replaced(code, PYTHON):
        # `for x in y` is no comparison.
        if old != " in " or not re.search(r"\bfor [^:]*$", code[code.rfind("\n", 0, at) + 1 : at]):
            yield _mutant(source, at, old, new)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    for node in ast.walk(tree):
        if new := _instead_of(node):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            before, old = source.encode()[:begin].decode(), source.encode()[begin:end].decode()
            yield _mutant(source, len(before), old, new)


def _instead_of(node):
    """What a statement becomes whose effect is taken away; None if it has none to lose."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return None
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return "return None"
        case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Raise():
            return "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "pass"
    return None


def _python_code(source):
    """The source with blanks for comments and strings."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    code = source
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TEXT:
            begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            code = code[:begin] + _blank(code[begin:end]) + code[end:]
    return code


TEXT = {tokenize.COMMENT, tokenize.STRING}
# Since Python 3.12, an f-string is several tokens.
TEXT |= {getattr(tokenize, name) for name in ("FSTRING_MIDDLE",) if hasattr(tokenize, name)}


def _of_lua(source):
    code = re.sub(r"--[^\n]*|'[^'\n]*'|\"[^\"\n]*\"", lambda text: _blank(text[0]), source)
    for at, old, new in _replaced(code, LUA):
        yield _mutant(source, at, old, new)
    for statement in LUA_STATEMENT.finditer(code):
        yield _mutant(source, statement.start(), source[slice(*statement.span())], "")
    for answer in LUA_ANSWER.finditer(code):
        yield _mutant(source, answer.start(1), source[slice(*answer.span(1))], "false")


def _replaced(code, table):
    longest_first = sorted(table, key=len, reverse=True)
    whole_words = (re.sub(r"^(?=\w)|(?<=\w)$", r"\\b", re.escape(old)) for old in longest_first)
    for found in re.finditer("|".join(whole_words), code):
        yield found.start(), found[0], table[found[0]]
    for number in NUMBER.finditer(code):
        yield number.start(), number[0], str(int(number[0]) + 1)


def _mutant(source, at, old, new):
    return Mutant(source.count("\n", 0, at) + 1, at, old, new)


def _blank(text):
    return re.sub(r"[^\n]", "\0", text)
