"""What the package logs, by which logger and at which levels."""

from tests.package.test_logs import logged


def test_each_line_has_the_logger_and_the_levels_that_were_written_down(golden):
    golden("logs.txt", "\n".join(f"{one.loggers} | {one.levels} | {one.text}" for one in logged()))
