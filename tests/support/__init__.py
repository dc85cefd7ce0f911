"""What the tests share: servers, a fault proxy, child processes; and the tests of that."""
