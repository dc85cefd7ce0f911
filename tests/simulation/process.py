"""A client: one process, with a clock and a network of its own. In it, the shipped code runs."""

from collections import deque
from random import Random

from django_redislock.backends import drivers
from django_redislock.backends.base import Backend
from django_redislock.backends.redis.sessions import LATEST, TOO_LATE
from django_redislock.backends.watchdog import Watchdog
from django_redislock.conf import Conf
from django_redislock.rules import flows, scripts
from django_redislock.rules.forms import Attempt
from django_redislock.rules.keys import channel
from django_redislock.rules.steps import Answer, Bell, Call, NotDone, Tell, Unanswered
from tests.simulation.server import PREFIX
from tests.simulation.timeline import Thread, this_thread

CALM_AFTER = 9.0  # Seconds after a fault in which the calls that it met are over.
TICK = 1e-6  # Seconds: the shortest wait.
MOST_IDLE = 4  # Lines that a process keeps.


class Process:
    """One life of a client, from its start to its end.

    Attributes:
        number: Of the client.
        rate: Seconds that its clock counts in one second.
        is_dead: Whether it was killed.
        is_unplugged: Whether its machine has lost its power, so that nobody hears of it.
        paused_until: When it goes on, if it stands still.
        retransmits: Whether what it sends while it is cut off arrives after that.
        disturbed_at: When something went wrong for it last.
        troubles: What befalls its next messages.
    """

    def __init__(self, number, life, timeline, network, rate, seed, seconds_per_message):
        self.number = number
        self.alias = f"{number}.{life}"
        self.rate = rate
        self.is_dead = self.is_unplugged = False
        self.paused_until = self.cut_off_until = 0.0
        self._paused_for = 0.0  # In all, with what is still to come of a pause.
        self.retransmits = False
        self.slowness = 1.0
        self.disturbed_at = -CALM_AFTER
        self.troubles = deque()
        self.threads = []
        self.rings_to_miss = 0
        self.lines_opened = 0
        self._idle = []
        self._network = network
        self._timeline = timeline
        self._random = Random(f"{seed}/{self.alias}")
        self._seconds_per_message = seconds_per_message
        self._began = self._random.uniform(0, 1e6)  # Each clock shows another time.

    def __str__(self):
        return f"client {self.number}" if self.number else "the operator"

    # --- time -----------------------------------------------------------------------------------

    @property
    def now(self):
        """The true time."""
        return self._timeline.now

    def clock(self):
        """The time by its own clock."""
        return self._began + self.rate * self._timeline.now

    def after(self, seconds):
        """The true time at which its clock has counted so many seconds more.

        A wait takes a microsecond or more. Else one that rounding makes out of nothing would end at
        the time at which it began, for ever.
        """
        return self.now + (max(seconds, TICK) if seconds > 0 else seconds) / self.rate

    def running(self):
        """The time by its own clock, less that in which it stood still."""
        return self.clock() - self.rate * (self._paused_for - self._still_to_pause())

    def pause(self, seconds):
        """Let it stand still from now on."""
        self._paused_for += max(seconds - self._still_to_pause(), 0)
        self.paused_until = max(self.paused_until, self.now + seconds)

    def _still_to_pause(self):
        return max(self.paused_until - self.now, 0)

    @property
    def is_well(self):
        """Whether nothing is wrong with it, and has not been for a while."""
        return (
            not self.is_dead
            and self.slowness == 1.0
            and self.now >= max(self.disturbed_at, self.cut_off_until) + CALM_AFTER
            and self.now >= self.paused_until
        )

    def begin(self, code):
        """Start a thread."""
        thread = Thread(self._timeline, self, code)
        self.threads = [*(one for one in self.threads if not one.dead), thread]
        thread.begin()
        return thread

    def disturb(self):
        """Note that something goes wrong for it."""
        self.disturbed_at = max(self.disturbed_at, self.now)

    def at_full_speed(self):
        """Its network is as fast as before."""
        self.slowness = 1.0
        self.disturb()

    def kill(self):
        """End it. Its connections are closed, unless nobody hears of it."""
        self.is_dead = True
        for thread in self.threads:
            if not thread.dead:
                thread.kill()
        for line in self._idle:
            line.close()

    # --- its network ----------------------------------------------------------------------------

    @property
    def is_cut_off(self):
        return self.cut_off_until > self.now

    def latency(self):
        """Seconds that the next message takes: most are fast, and a few are slow."""
        usual = self._seconds_per_message * self.slowness
        return 0.0001 + usual * (0.5 + float(self._random.random()) ** 6 * 10)

    def next_trouble(self, message):
        """What befalls a message that is sent now."""
        return self.troubles.popleft() if self.troubles else None

    def misses_ring(self):
        """Whether a ring that is sent now gets lost."""
        misses = self.rings_to_miss > 0
        self.rings_to_miss -= misses
        return misses

    def idle_line(self):
        """A line that is open, and that nobody uses."""
        while self._idle:  # Any of them: the last one used may be another thread's by now.
            line = self._idle.pop(self._random.randrange(len(self._idle)))
            if line.is_open:
                return line
        return None

    def line(self, within):
        """The same, or else a new one."""
        line = self.idle_line()
        if line is None:
            self.lines_opened += 1
            name = channel(PREFIX, self.alias, self.lines_opened)
            line = self._network.connect(self, name, within)
        return line

    def give(self, line):
        """Let others use a line."""
        if line.is_open and len(self._idle) < MOST_IDLE:
            self._idle.append(line)
        else:
            line.close()


class SimulatedBackend(Backend):
    """The locks of one process, on the simulated server."""

    def __init__(self, place):
        self.place = place
        self.clock = place.clock
        conf = Conf(alias=place.alias, key_prefix=PREFIX, release_before_commit="ignore")
        super().__init__(conf)

    def _start(self):
        super()._start()
        self.process = self.place.alias  # Not by chance.
        self.watchdog = SimulatedWatchdog(self, Renewer(self.place))

    def session(self, form=None):
        return Session(self.place, form.connection if form is not None else None)

    def async_session(self, form=None):
        raise NotImplementedError("Simulated processes have no event loops.")

    def call_many(self, calls):
        session = Session(self.place)
        outcomes = session.call_all(calls)
        session.close()
        return outcomes

    def begin(self, form):
        """Do a first step without a flow, as backends/redis/calling.py does: FirstSteps.begin()."""
        line = self.place.idle_line() if form.is_plain else None
        if line is None:
            return
        form.sent = self.clock()
        try:
            (form.reply,) = line.ask([self._call_of(form)], form.terms.one_try, rung=form.waits)
            form.now = self.clock()
            if form.reply.__class__ is not bytes and not self._was_rung(form, line):
                form.connection = line
                return
        except Unanswered as trouble:
            form.trouble = trouble
            return
        self.place.give(line)

    def _call_of(self, form):
        if isinstance(form, Attempt):
            flow = flows.acquire(form, form.sent)
            call = next(flow)
            flow.close()
            assert isinstance(call, Call)
            return call
        return Tell(scripts.RELEASE, form.name, (form.token,), form.permit)

    def _was_rung(self, form, line):
        if not isinstance(form, Attempt) or not (seconds := form.seconds_to_listen()) > 0:
            return False
        granted = form.heard(line.next_ring(form.id, seconds), self.clock())
        if granted is None:
            return False
        terms = form.terms
        line.tell(
            flows.confirmation(form.name, form.token, terms.first_ttl, terms.renews, granted.permit)
        )
        form.granted = granted
        return True


class Session(drivers.Blocking):
    """What one flow asks for, done on one line from its first step to its last."""

    def __init__(self, place, line=None):
        self._place = place
        self._line = line

    def call(self, step):
        sent, (value,) = self._ask([step], step.within, rung=bool(step.listening))
        return Answer(value, sent, self._place.clock())

    def elsewhere(self, step):
        """Perform another flow here: each process knows itself by an alias, and all are in one."""
        return drivers.run(step.flow, Session(self._place))

    def call_all(self, calls):
        try:
            sent, values = self._ask(calls, calls[0].within)
        except Unanswered as trouble:
            return [trouble for _ in calls]
        return [Answer(value, sent, self._place.clock()) for value in values]

    def tell(self, step):
        self._open(flows.CONFIRM_WITHIN / 2).tell(step)

    def listen(self, step):
        if self._line is None:
            now = self._place.clock()
            raise Unanswered("the line was cut", now, now)
        ring = self._line.next_ring(step.id, step.seconds)
        return Bell(ring.decode().split() if ring else [], self._place.clock())

    def pause(self, step):
        self.close()
        this_thread().sleep(self._place.after(step.seconds))
        return self._place.clock()

    def close(self):
        if (line := self.keep()) is not None:
            self._place.give(line)

    def keep(self):
        """Leave the line, if it has one, to whoever calls this."""
        line, self._line = self._line, None
        return line

    def _ask(self, steps, within, *, rung=False):
        began = self._place.clock()
        line = self._open(within)
        sent = self._place.clock()
        if sent - began > LATEST * within:
            raise NotDone(TOO_LATE, began, sent)
        return sent, line.ask(steps, within - (sent - began), rung=rung)

    def _open(self, within):
        if self._line is None or not self._line.is_open:
            self._line = None
            self._line = self._place.line(within)
        return self._line


class Renewer:
    """The line on which a watchdog renews."""

    def __init__(self, place):
        self._place = place
        self._line = None

    def renew_many(self, calls):
        session = Session(self._place, self._line)
        self._line = None
        outcomes = session.call_all(calls)
        self._line = session.keep()
        return outcomes

    def prepare_watchdog(self):
        """See watchdog.Renewer: here a line takes no time to open."""

    def close_watchdog(self):
        pass


class SimulatedWatchdog(Watchdog):
    """The watchdog that ships, in a simulated thread."""

    def __init__(self, backend, renewer):
        super().__init__(backend, renewer)
        self._place = backend.place
        self._sleeper = None

    def _start_thread(self, name):
        self._thread = self._place.begin(self._run)

    def _wake(self, name):
        super()._wake(name)
        if self._sleeper is not None:
            self._sleeper.wake()

    def _sleep(self, seconds):
        if self._bell.empty():
            self._sleeper = this_thread()
            try:
                self._sleeper.sleep(self._place.after(seconds))
            finally:
                self._sleeper = None
        while not self._bell.empty():
            self._bell.get(timeout=0)
