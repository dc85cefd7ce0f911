"""What import-linter cannot see: nobody touches the private names of another class."""

import ast

import pytest

from tests import ROOT

PACKAGE = ROOT / "django_redislock"
FILES = sorted(PACKAGE.rglob("*.py"))

# The underscore of a named tuple's methods keeps them apart from its fields; they are public.
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
# Django documents them under these names.
OF_MODELS = {"_base_manager", "_meta"}
# Of other libraries, where they have no public way; each is explained where it is used.
OF_OTHERS = {
    "asyncio._get_running_loop",
    "redis_connection._parser",
    "redis_connection._reader",
    "redis_connection._sock",
    "redis_connection._writer",
    "signals.import_modules._live_receivers",
}
# A weak reference to the object itself.
ITSELF = {"self", "cls", "this"}


def private_touches(path):
    """Private names of something else than the object itself or its base class."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        of = ast.unparse(node.value)
        is_public = node.attr.startswith("__") or node.attr in OF_TUPLES | OF_MODELS
        if (
            not is_public
            and of not in {*ITSELF, "super()"}
            and f"{of}.{node.attr}" not in OF_OTHERS
        ):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno} {of}.{node.attr}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_touches_a_private_name_of_another_class(path):
    assert list(private_touches(path)) == []


def test_only_a_lease_state_changes_itself():
    written = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and ast.unparse(node.value).endswith("state")
    ]
    assert written == []
