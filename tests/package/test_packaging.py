"""The wheel has all that the package needs, the source distribution all that the project has."""

import ast
import filecmp
import os
import re
import subprocess
import tarfile
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import EntryPoint
from importlib.util import module_from_spec, spec_from_file_location

import pytest

import django_redislock
from tests import ROOT
from tests.support.processes import python

PACKAGE = ROOT / "django_redislock"
LEFTOVERS = ("__pycache__", "*.orig", "*.rej", "*~")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(made_once):
    """Where the source distribution and the wheel made of it are."""
    return made_once("packaging", partial(build, umask=0o022))


def build(folder, *, umask):
    """Build as a release is built, from a copy, so that building leaves nothing in the checkout."""
    source = folder / "source"
    old = os.umask(umask)
    try:
        for name in files_of_the_project():
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
        python(
            *("-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)),
            env=os.environ | {"SOURCE_DATE_EPOCH": "1893456000"},
            timeout=170,
        )
    finally:
        os.umask(old)
    return folder / "dist"


def files_of_the_project():
    """What is committed, or would be by ``git add``; in a source distribution, what it lists."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    (sources,) = ROOT.glob("*.egg-info/SOURCES.txt")
    return {
        name
        for name in sources.read_text().splitlines()
        if name.split("/")[0] != sources.parent.name
    }


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture
def unpacked(built, tmp_path):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (top,) = tmp_path.iterdir()
    return top


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    ours = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and not any(fnmatch(part, one) for part in path.parts for one in LEFTOVERS)
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == ours


def test_the_source_distribution_has_every_file_of_the_project_as_it_is(unpacked):
    files = files_of_the_project()
    assert {"CONTRIBUTING.md", ".ci/run", "Makefile", "docs/index.md", "tests/conftest.py"} <= files
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    made = {name for name in there if name == "PKG-INFO" or ".egg-info/" in name}
    assert there - made == files
    assert [name for name in files if not filecmp.cmp(unpacked / name, ROOT / name, False)] == []


def test_in_the_source_distribution_the_tests_run(unpacked):
    tested = unpacked / "tests" / "package" / "test_whence.py"
    tested.write_text(f"""
import django_redislock

def test_the_package_is_the_one_beside_the_tests():
    assert django_redislock.__file__.startswith({str(unpacked)!r})
""")
    some = ["tests/rules/test_options.py", str(tested)]
    ran = python("-m", "pytest", "-q", *some, cwd=unpacked, timeout=170)
    assert re.search(r"^\d\d+ passed", ran.stdout, flags=re.MULTILINE)


def test_who_builds_it_elsewhere_with_another_umask_gets_the_same_bytes(built, tmp_path):
    again = build(tmp_path, umask=0o077)
    names = sorted(path.name for path in built.iterdir())
    assert len(names) == 2
    for name in names:
        assert (again / name).read_bytes() == (built / name).read_bytes(), name


def test_the_metadata_tells_what_it_is_and_what_it_needs(metadata):
    assert metadata["Name"] == "django_redislock"
    assert metadata["Version"] == django_redislock.__version__
    assert (metadata["License-Expression"] or metadata["License"]) == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"celery", "testing", "test", "demo"} <= set(metadata.get_all("Provides-Extra", []))
    required = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    names = [one.lower().rstrip("0123456789.>=") for one in required]
    assert sorted(names) == ["django", "redis[hiredis]"]


def test_the_changelog_has_the_version_and_begins_with_what_is_not_released():
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections[:2] == ["Unreleased", django_redislock.__version__]


def relative_links(text):
    flags = re.MULTILINE | re.DOTALL
    links = re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```", "", text, flags=flags))
    return [link for link in links if not link.startswith("https://")]


def test_on_the_package_index_no_link_leads_into_nothing(metadata):
    shown = metadata.get_payload()
    assert isinstance(shown, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert shown.startswith("# django-redislock")
    assert "with distributed_lock(" in shown
    assert relative_links(shown) == []
    assert not re.search(r"\[[^]]*\]\(", shown)  # Not half of one either.


def setup_file():
    spec = spec_from_file_location("setup", ROOT / "setup.py")
    spec.loader.exec_module(setup := module_from_spec(spec))
    return setup


def test_with_a_repository_links_lead_into_it():
    setup = setup_file()
    readme = (ROOT / "README.md").read_text()
    shown = setup.for_index(readme, "https://example.org/redislock")
    assert relative_links(shown) == []
    assert "](https://example.org/redislock/raw/HEAD/docs/screenshots/list-light.png)" in shown
    assert "[Locks](https://example.org/redislock/blob/HEAD/docs/locks.md)" in shown
    assert len(re.findall(r"\]\(", shown)) == len(re.findall(r"\]\(", readme))
    for link in setup.links("https://example.org/redislock").values():
        assert link.startswith("https://example.org/redislock")
        _, _, file = link.partition("/blob/HEAD/")
        assert (ROOT / file).exists()


def test_an_address_of_the_project_is_shown_only_if_setup_cfg_has_it(metadata):
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    url = config.get("metadata", "url", fallback="")
    shown = dict(one.split(", ") for one in metadata.get_all("Project-URL", []))
    assert shown == setup_file().links(url)
    assert metadata["Home-page"] == (url or None)
    known = "keepachangelog.com", "semver.org", "www.contributor-covenant.org"
    for file in [*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.*")]:
        hosts = re.findall(r"https?://([\w.-]+)", file.read_text())
        assert set(hosts) <= {*known}, file
        assert not re.search(r"[\w.]@[\w-]+\.[a-z]", file.read_text()), file


def test_nothing_that_the_package_says_sends_to_a_file_that_is_not_installed():
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        documents = {
            node.body[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and isinstance(node.body[:1] and node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node not in documents:
                assert "docs/" not in str(node.value), f"{file}:{node.lineno}"


def test_the_pytest_plugin_is_registered(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "[pytest11]" in wheel.read(name).decode()
    plugin = EntryPoint("plugin", "django_redislock.pytest_plugin", "pytest11").load()
    assert callable(plugin.redislock)


EXTRAS = {"celery": "celery", "otel": "opentelemetry", "testing": "lupa"}

USE = """
import sys
folder, missing = sys.argv[1:]
sys.path.insert(0, folder)
if missing:
    sys.modules[missing] = None
import django, django_redislock
from django.conf import settings
apps = ["django_redislock"] if missing in {"celery", "lupa"} else ["django_redislock.contrib.otel"]
settings.configure(
    INSTALLED_APPS=apps,
    REDISLOCK={"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}},
)
try:
    django.setup()
    from django_redislock import distributed_lock, single_instance_task
    with distributed_lock("lottery") as lease:
        print("held", lease.held, django_redislock.__file__)
except Exception as error:
    print(error)
"""


def test_the_wheel_works_by_itself_and_names_the_extra_that_is_missing(wheel, tmp_path):
    wheel.extractall(tmp_path)

    def says(missing):
        return python("-I", "-c", USE, str(tmp_path), missing, cwd=tmp_path).stdout

    assert says("").startswith(f"held True {tmp_path}")
    for extra, module in EXTRAS.items():
        assert f"django_redislock[{extra}]" in says(module)
