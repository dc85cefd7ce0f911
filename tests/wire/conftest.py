"""The option of tests/wire/."""


def pytest_addoption(parser):
    parser.addoption("--write-wire", action="store_true", help="write down anew what is sent")
