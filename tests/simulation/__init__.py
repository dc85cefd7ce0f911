"""Simulated hours of locks: many clients, a network, a server, and faults, all decided by a seed.

The shipped code runs: handles, leases, the watchdog, flows and forms over the shipped scripts. Only
time, threads, the network and the server's memory are made up, so an hour takes seconds, and the
same seed tells the same story to the letter.

* timeline.py: time, and threads that run in it.
* network.py: connections, and what becomes of a message on them.
* server.py: the scripts, over the keyspace of the in-memory backend; crashes, and a replica.
* process.py: a process with a clock, a backend, connections and threads.
* client.py: what wants locks in it.
* plan.py: what clients do and what goes wrong, as a list of steps that a seed decides.
* world.py: carries out a plan.
* commands.py: what no command may do to a lock.
* promises.py: what must not be, looked for after every event.
* shrinking.py: the fewest steps of a plan that still break the promise.
* controls.py: variants with one rule left out. The simulation must find what each breaks.
* report.py: how much was simulated, and what happened while what went on.
"""
