"""An exhaustive model of the protocol: every interleaving of a few clients, a server and faults.

It runs the real rules (django_redislock.rules.flows) and the real scripts (django_redislock/lua,
over the keyspace of the in-memory backend); only time and the network are made up.

* book.py: a flow as a function of what it was told so far, so that it can be branched.
* server.py: a script as a function of what the server kept before, and of its arguments.
* promises.py: what no command may do, whoever sends it; the simulation looks for that too.
* world.py: one moment of the world, and all that may happen next.
* search.py: visits every moment within the bounds, and checks the promises in each.
* naive.py: variants of the protocol that look right and are not. The model must catch them.

    report = explore(Setup(waits=(math.inf, 0.0), faults=1, kinds={"cut"}))
    print(report)          # 23456 states, 78901 steps, nobody waited longer than 3.5 s
"""
