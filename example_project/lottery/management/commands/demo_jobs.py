"""`manage.py demo_jobs`: whatever the job is, one server runs it.

Three servers start a command, a shell script and a task of Django at the same moment. Two of them
have a Celery beat, too: the one that leads is killed, and the other one goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lottery.demo.beats import Beats
from lottery.demo.jobs import Jobs
from lottery.demo.servers import manage_command
from lottery.demo.stage import DemoCommand

if TYPE_CHECKING:
    from lottery.demo.beats import Beat
    from lottery.demo.stage import Stage

SERVERS = ("web-1", "web-2", "web-3")
WITH_BEAT = SERVERS[:2]
AT_LEAST = 3  # due times that each beat sends
ENDS_WITHIN = 90  # seconds


class Command(DemoCommand):
    """Runs the demo."""

    help = "Start each kind of job on three servers: one runs it. Kill a beat: another goes on."

    def handle(self, **options: Any) -> None:
        """Run it; the exit status is 1 if a job was not run once, or a due time was sent twice."""
        self.say(f"{len(SERVERS)} servers start the same command, script and task; one runs each.")
        self.say(f"{len(WITH_BEAT)} of them have a beat; one leads, and is killed.", "")
        with self.stage(ENDS_WITHIN) as stage:
            jobs = self._run_jobs(stage)
            self.say("", jobs.table(), "")
            beats, takeover = self._kill_a_beat(stage)
            self.say("", "$ manage.py locks runs", self._records(stage))
            contradictions = [*jobs.contradictions(), *beats.contradictions()]
            result = f"RESULT servers={len(SERVERS)} {jobs} {beats} takeover={takeover:.1f}s"
        for contradiction in contradictions:
            self.stderr.write(contradiction)
        self.say(result)
        if contradictions:
            raise SystemExit(1)

    def _run_jobs(self, stage: Stage) -> Jobs:
        """Start all jobs on all servers, and wait for their ends."""
        jobs = Jobs(SERVERS, stage)
        self.progress("servers", f"{', '.join(SERVERS)} start all their jobs")
        while not jobs.are_over():
            stage.patience.pause("running the jobs", 0.1)
        self.progress("servers", "all jobs have ended")
        return jobs

    def _kill_a_beat(self, stage: Stage) -> tuple[Beats, float]:
        """Kill the beat that leads; returns also how many seconds later the other one has sent."""
        beats = Beats(WITH_BEAT, stage)
        while not beats.have_roles():
            stage.patience.pause("starting the beats")
        leader, standby = beats.leader, beats.standby
        self.progress(leader.name, f"leads, pid {leader.pid}")
        self.progress(standby.name, f"stands by, pid {standby.pid}")
        self._watch(stage, beats, leader)
        leader.kill()
        self.progress(leader.name, "is killed")
        killed_at = time.monotonic()
        while not beats.sent_by(standby):
            stage.patience.pause(f"waiting for {standby.name} to lead")
        takeover = time.monotonic() - killed_at
        self.progress(standby.name, f"leads, {takeover:.1f} s later")
        self._watch(stage, beats, standby)
        return beats, takeover

    def _watch(self, stage: Stage, beats: Beats, beat: Beat) -> None:
        """Wait until *beat* has sent a few times, and tell for which due times."""
        while len(sent := beats.sent_by(beat)) < AT_LEAST:
            stage.patience.pause(f"waiting for {beat.name} to send")
        self.progress(beat.name, f"has sent what was due at {', '.join(sent)}")

    def _records(self, stage: Stage) -> str:
        """What operators see."""
        command = stage.start("operator", manage_command("locks", "runs"))
        while command.status is None:
            stage.patience.pause("reading the records")
        command.check()
        return command.out()
